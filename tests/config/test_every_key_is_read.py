"""Every option has a reader outside verl.config: an option that nothing reads would be accepted and change nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from key_reads import Program
from source_types import Read, read_sources, schema_classes

import verl
from verl.config.keys import schema_keys
from verl.config.schema import EvalConfig, GenerationConfig, PPOConfig, ServeConfig, SFTConfig

# Options that are right although no code outside verl.config reads them, each with its reason.
EXCEPTIONS: dict[str, str] = {
    "ActorConfig.strategy": "its two values mean the same engine; the schema rejects all others",
}

SCHEMAS = (PPOConfig, SFTConfig, EvalConfig, GenerationConfig, ServeConfig)

# What these modules of verl.config compute is read in place of the options that it is made from.
DERIVED = ("verl.config.derived", "verl.config.batch_plan")
NO_READERS = ("verl.config", "verl.cli")


def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def effective_reads(program: Program) -> set[Read]:
    """Reads outside verl.config, and those of derived values that something outside uses."""
    outside = {name for module, _, name in program.uses if not inside(module, NO_READERS)}
    used = {(m, d) for m, d, _ in program.uses if m in DERIVED and d in outside}
    grown = True
    while grown:
        names = {name for module, definition, name in program.uses if (module, definition) in used}
        more = {(m, d) for m, d, _ in program.uses if m in DERIVED and d in names} - used
        used |= more
        grown = bool(more)
    return {r for r in program.reads if not inside(r.module, NO_READERS) or (r.module, r.definition) in used}


def followed_by_defaults(schema: type) -> set[tuple[str, str]]:
    """Fields that the default of another field refers to: "checkpoints/${trainer.project_name}"."""
    keys = schema_keys(schema)
    targets = [name for key in keys.values() for name in re.findall(r"\$\{([\w.]+)\}", str(key.default))]
    return {(keys[name].owner, keys[name].field) for name in targets}


@cache
def readers(root: Path) -> dict[str, set[str]]:
    """{"Class.field": modules that read it} for the whole schema."""
    classes = list(dict.fromkeys(cls for schema in SCHEMAS for cls in schema_classes(schema)))
    program = Program(classes)
    program.analyse(read_sources(root, "verl"))
    found: dict[str, set[str]] = {f"{cls.__name__}.{f.name}": set() for cls in classes for f in fields(cls)}
    for read in effective_reads(program):
        found[f"{read.owner}.{read.field}"].add(read.module)
    for owner, name in {pair for schema in SCHEMAS for pair in followed_by_defaults(schema)}:
        found[f"{owner}.{name}"].add("verl.config.schema (a default)")
    return found


def test_every_key_has_a_reader():
    found = readers(Path(verl.__file__).parent)
    unread = sorted(name for name, modules in found.items() if not modules and name not in EXCEPTIONS)
    assert not unread, "nothing reads:\n  " + "\n  ".join(unread)


def test_exceptions_are_needed():
    found = readers(Path(verl.__file__).parent)
    assert [name for name in EXCEPTIONS if found.get(name, {"no such field"})] == []


# -- the walker itself, on small sources


@dataclass
class Inner:
    a: int = 0
    b: float | None = None
    c: str = ""


@dataclass
class Outer:
    inner: Inner
    d: int = 0
    e: int = 0


def reads_of(source: str, **more: str) -> set[str]:
    program = Program([Inner, Outer])
    program.analyse({"m": source, **more})
    return {f"{r.owner}.{r.field}" for r in program.reads}


def test_parameter_local_and_optional():
    assert reads_of("def f(config: 'Outer | None'):\n    inner = config.inner\n    return inner.a + config.d") == {
        "Outer.inner",
        "Inner.a",
        "Outer.d",
    }


def test_self_attribute_and_base_class():
    source = """
class Base:
    def __init__(self, config: Outer):
        self.config = config
class Child(Base):
    def run(self):
        if (inner := self.config.inner) and inner.a:
            return [x.b for x in (inner, None)]
"""
    assert reads_of(source) == {"Outer.inner", "Inner.a", "Inner.b"}


def test_writing_is_not_reading():
    assert reads_of("def f(config: Outer):\n    config.d = 1\n    other = 3\n    other.e") == set()


def test_augmented_assignment_writes_alone():
    assert reads_of("def f(config: Outer):\n    config.d += 1") == set()


def test_same_name_on_another_object_is_not_a_read():
    assert reads_of("class Plan:\n    a: int\ndef f(plan: Plan, unknown):\n    return plan.a, unknown.b") == set()


def test_returned_config_method_and_property():
    source = """
def load() -> Outer: ...
class Run:
    def __init__(self):
        self.config = load()
    @property
    def inner(self):
        return self.config.inner
    def go(self):
        return self.inner.c, load().e
"""
    assert reads_of(source) == {"Outer.inner", "Inner.c", "Outer.e"}


def test_unannotated_parameter_gets_the_type_of_its_argument():
    source = "def f(x, *, y=None):\n    return x.a, y.d\ndef g(config: Outer):\n    return f(config.inner, y=config)"
    assert reads_of(source) == {"Outer.inner", "Inner.a", "Outer.d"}


def test_alias_getattr_replace_loop_and_closure():
    source = """
from somewhere import Inner as Settings
def f(s: Settings, many: list[Outer]):
    def g():
        return replace(s, a=1).c
    key = lambda: getattr(s, "b")
    for outer in many:
        print(outer.d, {k: v.inner for k, v in enumerate(many)})
"""
    assert {"Inner.c", "Inner.b", "Outer.d"} <= reads_of(source)


def test_reads_in_another_module_are_found_by_class_name():
    run = "from m import Holder\ndef go(h: Holder):\n    return h.settings.a"
    assert reads_of("@dataclass\nclass Holder:\n    settings: Inner", n=run) == {"Inner.a"}


def test_derived_values_count_only_if_used_outside():
    derived = "def used(o: Outer):\n    return helper(o)\ndef helper(o: Outer):\n    return o.d\ndef unused(o: Outer):\n    return o.e"
    program = Program([Inner, Outer])
    program.analyse({"verl.config.derived": derived, "verl.trainer.t": "def f(x):\n    return used(x)"})
    assert {r.field for r in program.reads} == {"d", "e"}
    assert {r.field for r in effective_reads(program)} == {"d"}


def test_reads_in_the_config_package_do_not_count():
    program = Program([Inner, Outer])
    program.analyse({"verl.config.validate": "def f(o: Outer):\n    return o.d"})
    assert effective_reads(program) == set()


if __name__ == "__main__":
    table = readers(Path(verl.__file__).parent)
    for name, modules in sorted(table.items(), key=lambda item: bool(item[1])):
        print(f"{name:<55} {', '.join(sorted(modules)) or EXCEPTIONS.get(name, 'NOTHING READS IT')}")
