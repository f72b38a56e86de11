"""The report's HTML around charts and tables: style and script inside, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Okabe-Ito hues, which colour-blind readers tell apart; lighter on dark ground.
_STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --ink: #1c1e21; --soft: #63686f; --line: #e3e5e8;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b4579a; --c4: #b58900; --c5: #3f97c6; --c6: #6b6f76; --c7: #7a4b2a; }
@media (prefers-color-scheme: dark) { :root { --bg: #15171a; --card: #1d2024; --ink: #e7e9ec; --soft: #9aa1aa;
  --line: #31363c; --c0: #56a8e0; --c1: #f08a4b; --c2: #3cc69b; --c3: #dc92c5; --c4: #e6c34a; --c5: #8fd0f2;
  --c6: #a7adb5; --c7: #c99a74; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 28px 20px 60px; background: var(--bg); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 34px 0 12px; font-size: 18px; }
.soft, .note { color: var(--soft); } .note { font-size: 13px; }
.tiles, .charts { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); margin: 22px 0 14px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
@media (min-width: 1014px) { .charts figure:last-child:nth-child(odd) { grid-column: 1 / -1; justify-self: center; width: calc(50% - 7px); } }
.tile, figure, details, .samples, .notices { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
figure { margin: 0; padding: 12px 14px 8px; position: relative; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; margin-bottom: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 12px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; background: var(--c); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); } svg .hair { stroke: var(--soft); stroke-dasharray: 3 3; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); } .s3 { --c: var(--c3); }
.s4 { --c: var(--c4); } .s5 { --c: var(--c5); } .s6 { --c: var(--c6); } .s7 { --c: var(--c7); }
polyline { fill: none; stroke: var(--c); stroke-width: 1.9; stroke-linejoin: round; } polyline.raw { opacity: .3; stroke-width: 1; }
rect, circle { fill: var(--c); }
.tip { position: absolute; top: 40px; pointer-events: none; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 9px; font-size: 13px; box-shadow: 0 2px 8px #0003; white-space: nowrap; z-index: 1; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: 8px 12px;
  border-bottom: 1px solid var(--line); } tr:last-child td { border-bottom: 0; }
.scroll { overflow-x: auto; } .samples td { width: 33%; min-width: 200px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
.score { float: right; margin-left: 10px; padding: 0 8px; border-radius: 9px; border: 1px solid var(--line); font-size: 13px; }
details { margin: 10px 0; } summary { cursor: pointer; padding: 10px 14px; font-weight: 600; }
details td { padding: 3px 14px; font: 13px/1.45 ui-monospace, monospace; border: 0; overflow-wrap: anywhere; }
.notices { padding: 10px 14px 10px 32px; margin: 14px 0; }
"""

# A hair line at the step nearest to the pointer, and every value there.
_SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-rows]")) {
  const rows = JSON.parse(svg.dataset.rows), figure = svg.parentNode;
  const tip = document.createElement("div"); tip.className = "tip"; tip.hidden = true; figure.append(tip);
  const hair = document.createElementNS("http://www.w3.org/2000/svg", "line");
  hair.setAttribute("class", "hair"); hair.setAttribute("y1", svg.dataset.top); hair.setAttribute("y2", svg.dataset.bottom);
  const show = value => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : +value.toFixed(4);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const row = rows.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a);
    hair.setAttribute("x1", row[1]); hair.setAttribute("x2", row[1]); svg.append(hair);
    tip.replaceChildren(...["step " + row[0], ...Object.entries(row[2]).map(([k, v]) => k + "  " + show(v))].map(text => {
      const line = document.createElement("div"); line.textContent = text; return line; }));
    tip.hidden = false;
    const left = row[1] / scale + svg.offsetLeft;
    tip.style.left = (left + tip.offsetWidth + 24 > figure.clientWidth ? left - tip.offsetWidth - 10 : left + 12) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; hair.remove(); });
}
"""


def page(
    title: str,
    subtitle: str,
    tiles: Sequence[tuple[str, str, str]],
    charts: Sequence[str],
    samples: str,
    tables: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    notices: Sequence[str],
) -> str:
    """The whole page. charts and samples are HTML; everything else is text and escaped here."""
    parts = [f'<h1>{escape(title)}</h1><div class="soft">{escape(subtitle)}</div>']
    cards = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for label, value, note in tiles
    )
    parts.append(f'<div class="tiles">{cards}</div>' if cards else "")
    if notices:
        items = "".join(f"<li>{escape(text)}</li>" for text in notices)
        parts.append(f'<ul class="notices">{items}</ul>')
    parts.append(f'<div class="charts">{"".join(charts)}</div>' if charts else "<p>No metrics yet.</p>")
    if samples:
        parts.append(f'<h2>Samples</h2><div class="scroll">{samples}</div>')
    if tables:
        parts.append("<h2>Details</h2>")
    for name, rows in tables:
        cells = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in rows)
        parts.append(f"<details><summary>{escape(name)}</summary><table>{cells}</table></details>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}<script>{_SCRIPT}</script></body></html>\n"
    )
