"""The learning curve as text."""

import json

from verl.tracking.curve import learning_curve, plot


def test_plot_in_ascii_is_this_picture():
    assert plot([(0, 0.0), (1, 1.0), (2, 1.0)], width=9, height=3, ascii_only=True) == [
        "1.0 |   ******",
        "0.5 |  *",
        "  0 |**",
        "    +---------",
        "     0  step 2",
    ]


def test_plot_in_braille():
    drawn = plot([(0, 0.0), (3, 1.0)], width=2, height=1)
    # One dot a column from the lower left (0x40) to the upper right (0x08).
    assert drawn[0].endswith("┤" + chr(0x2800 + 0x40 + 0x20) + chr(0x2800 + 0x02 + 0x08))
    assert drawn[-1].endswith("step 3")


def write(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_learning_curve_titles_and_what_is_drawn(tmp_path):
    write(
        tmp_path,
        [
            {"step": 0, "val/test_score/tiny": 0.25},
            {"step": 1, "critic/score/mean": 0.4, "actor/pg_loss": 3.0},
            {"step": 2, "critic/score/mean": 0.5, "val/test_score/tiny": 0.75},
        ],
    )
    text = learning_curve(tmp_path, ascii_only=True)
    assert "val/test_score/tiny  0.250 -> 0.750 (+0.500)" in text
    assert "critic/score/mean  0.400 -> 0.500 (+0.100)" in text
    assert "pg_loss" not in text
    assert text.isascii()
    assert "⠀" <= max(learning_curve(tmp_path, ascii_only=False)) <= "⣿"
    assert max(len(line) for line in learning_curve(tmp_path, width=30).splitlines()) <= 60


def test_one_point_and_none(tmp_path):
    write(tmp_path, [{"step": 0, "val/test_score/tiny": 0.25}])
    assert "0.250 -> 0.250 (+0.000)" in learning_curve(tmp_path)
    write(tmp_path, [{"step": 0, "other": 1}])
    assert learning_curve(tmp_path) == ""
