"""Which code reads which config field: types of expressions followed through annotations, attributes and locals.

`python tests/config/test_every_key_is_read.py` lists every field of the schema with the modules that read it,
the unread ones first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from source_types import (
    NOTHING,
    ClassInfo,
    FunctionInfo,
    Read,
    Types,
    annotation_types,
    collection,
    declare_function,
    schema_fields,
)

_SAME_TYPE = {"replace", "copy", "deepcopy", "cast"}
_SAME_ITEMS = {"list", "tuple", "reversed", "sorted", "values", "iter"}


class Program:
    """Everything known about the sources, filled by passes until nothing new is learned."""

    def __init__(self, schema: Iterable[type]):
        self.schema: dict[str, dict[str, Types]] = {}
        for cls in schema:
            self.schema[cls.__name__] = schema_fields(cls)
        self.classes: dict[str, ClassInfo] = {}
        self.functions: dict[str, FunctionInfo] = {}
        self.reads: set[Read] = set()
        self.uses: set[tuple[str, str, str]] = set()  # (module, definition, name)

    def analyse(self, sources: dict[str, str]) -> None:
        """Read modules given as {dotted name: source}."""
        trees = {module: ast.parse(source) for module, source in sources.items()}
        for tree in trees.values():
            self._declare(tree)
        before = -1
        while before != self._size():
            before = self._size()
            for module, tree in trees.items():
                Walker(self, module).run(tree)

    def _size(self) -> int:
        functions = [*self.functions.values(), *(m for c in self.classes.values() for m in c.methods.values())]
        known = sum(len(f.returns) + sum(map(len, f.parameters.values())) for f in functions)
        return known + len(self.reads) + sum(len(t) for c in self.classes.values() for t in c.attributes.values())

    def _declare(self, tree: ast.AST) -> None:
        methods: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                info = self.classes.setdefault(node.name, ClassInfo())
                info.bases += [name for base in node.bases for name in annotation_types(base)]
                for item in node.body:
                    if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        info.methods[item.name] = declare_function(item)
                        methods.add(item)
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        info.attributes[item.target.id] = annotation_types(item.annotation)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node not in methods:
                self.functions[node.name] = declare_function(node)

    def lineage(self, name: str) -> list[ClassInfo]:
        """The class and its bases, as far as they are known."""
        found, queue, seen = [], [name], set()
        while queue:
            current = queue.pop(0)
            if current in self.classes and current not in seen:
                seen.add(current)
                found.append(self.classes[current])
                queue += self.classes[current].bases
        return found

    def method(self, cls: str, name: str) -> FunctionInfo | None:
        return next((info.methods[name] for info in self.lineage(cls) if name in info.methods), None)


class Walker(ast.NodeVisitor):
    """One pass over one module."""

    def __init__(self, program: Program, module: str):
        self.program = program
        self.module = module
        self.scopes: list[dict[str, Types]] = [{}]
        self.aliases: dict[str, str] = {}
        self.cls = ""
        self.function: FunctionInfo | None = None
        self.definition = ""

    def run(self, tree: ast.Module) -> None:
        for node in tree.body:
            is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            self.definition = node.name if is_definition else ""
            self.visit(node)

    # -- statements

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.aliases.update({a.asname: a.name for a in node.names if a.asname})

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.cls = self.cls, node.name
        self.scopes.append({})
        self.generic_visit(node)
        self.scopes.pop()
        self.cls = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        info = self.program.functions.get(node.name)
        method = self.program.classes.get(self.cls, ClassInfo()).methods.get(node.name)
        if method is not None and method.node is node:
            info = method
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._enter(node, info if info is not None and info.node is node else None, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter(node, None, [ast.Expr(node.body)])

    def _enter(self, node: ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef, info: FunctionInfo | None, body: list):
        arguments = node.args
        scope: dict[str, Types] = {}
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
        for argument, default in [*zip(positional, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]:
            types = self._resolve(annotation_types(argument.annotation))
            if default is not None:
                types |= self.types(default)
            if info is not None:
                types |= info.parameters.get(argument.arg, NOTHING)
            scope[argument.arg] = types
        is_method = info is not None and self.cls and info is self.program.classes[self.cls].methods.get(info.node.name)
        if is_method and positional:
            scope[positional[0].arg] = frozenset({self.cls})
        outer, self.function = self.function, info
        self.scopes.append(scope)
        for statement in body:
            self.visit(statement)
        self.scopes.pop()
        self.function = outer

    def visit_Return(self, node: ast.Return) -> None:
        types = self.types(node.value)
        if self.function is not None:
            self.function.returns |= types

    def visit_Assign(self, node: ast.Assign) -> None:
        types = self.types(node.value)
        for target in node.targets:
            self._bind(target, types, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        types = self._resolve(annotation_types(node.annotation)) | self.types(node.value)
        self._bind(node.target, types, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.types(node.target)
        self.types(node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind(node.target, self._items(self.types(node.iter)), None)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    visit_AsyncFor = visit_For  # type: ignore[assignment]

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            types = self.types(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, types, None)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With  # type: ignore[assignment]

    def _bind(self, target: ast.expr, types: Types, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = self.scopes[-1].get(target.id, NOTHING) | types
        elif isinstance(target, ast.Attribute):
            for owner in self.types(target.value):
                if owner in self.program.classes and owner not in self.program.schema:
                    attributes = self.program.classes[owner].attributes
                    attributes[target.attr] = attributes.get(target.attr, NOTHING) | types
        elif isinstance(target, (ast.Tuple, ast.List)):
            pairs = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [None] * len(target.elts)
            for item, part in zip(target.elts, pairs):
                self._bind(item, self._items(types) | types if part is None else self.types(part), part)
        else:
            self.types(target)

    # -- expressions

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Lambda):
            self.types(node)
        else:
            super().visit(node)

    def types(self, node: ast.expr | None) -> Types:
        """Classes that the value of an expression may have; records what it reads."""
        if node is None:
            return NOTHING
        special = getattr(self, f"_types_{type(node).__name__}", None)
        if special is not None:
            return special(node)
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        return NOTHING

    def _types_Name(self, node: ast.Name) -> Types:
        name = self.aliases.get(node.id, node.id)
        self.program.uses.add((self.module, self.definition, name))
        for scope in reversed(self.scopes):
            if node.id in scope:
                return scope[node.id]
        return NOTHING

    def _types_Attribute(self, node: ast.Attribute) -> Types:
        self.program.uses.add((self.module, self.definition, node.attr))
        owners = self.types(node.value)
        return self._attribute(owners, node.attr, isinstance(node.ctx, ast.Load))

    def _attribute(self, owners: Types, name: str, load: bool = True) -> Types:
        found: Types = NOTHING
        for owner in owners:
            if name in self.program.schema.get(owner, {}):
                if load:
                    self.program.reads.add(Read(owner, name, self.module, self.definition))
                found |= self.program.schema[owner][name]
            for info in self.program.lineage(owner):
                found |= info.attributes.get(name, NOTHING)
            method = self.program.method(owner, name)
            if method is not None and method.is_property:
                found |= method.annotated | method.returns
        return self._resolve(found)

    def _types_Call(self, node: ast.Call) -> Types:
        arguments = [self.types(a) for a in node.args]
        keywords = {k.arg: self.types(k.value) for k in node.keywords}
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = self.aliases.get(name, name)
        owners = self.types(node.func.value) if isinstance(node.func, ast.Attribute) else NOTHING
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owners |= frozenset({node.func.value.id}) & set(self.program.classes)  # a class method
        self.program.uses.add((self.module, self.definition, name))
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return self._attribute(arguments[0], str(node.args[1].value))
        if name in _SAME_TYPE and arguments:
            return frozenset().union(*arguments)
        if name in _SAME_ITEMS and name not in self.program.functions:
            return owners.union(*arguments)
        if name in self.program.schema:
            return frozenset({name})
        if name in self.program.classes and not owners:
            self._pass(self.program.method(name, "__init__"), arguments, keywords, bound=True)
            return frozenset({name})
        called = [m for owner in owners if (m := self.program.method(owner, name))]
        if not called and name in self.program.functions:
            self._pass(self.program.functions[name], arguments, keywords, bound=False)
            called = [self.program.functions[name]]
        else:
            for method in called:
                self._pass(method, arguments, keywords, bound=True)
        if not called and not isinstance(node.func, (ast.Name, ast.Attribute)):
            self.visit(node.func)
        return self._resolve(frozenset().union(*(m.annotated | m.returns for m in called)))

    def _pass(self, called: FunctionInfo | None, arguments: list[Types], keywords: dict, *, bound: bool) -> None:
        """Types of arguments reach parameters, which an author may have left without annotation."""
        if called is None:
            return
        spec = called.node.args
        names = [a.arg for a in [*spec.posonlyargs, *spec.args]][1 if bound else 0 :]
        for name, types in [*zip(names, arguments), *keywords.items()]:
            if name is not None:
                called.parameters[name] = called.parameters.get(name, NOTHING) | types

    def _types_NamedExpr(self, node: ast.NamedExpr) -> Types:
        types = self.types(node.value)
        self._bind(node.target, types, node.value)
        return types

    def _types_IfExp(self, node: ast.IfExp) -> Types:
        self.types(node.test)
        return self.types(node.body) | self.types(node.orelse)

    def _types_BoolOp(self, node: ast.BoolOp) -> Types:
        return frozenset().union(*[self.types(v) for v in node.values])

    def _types_Await(self, node: ast.Await) -> Types:
        return self.types(node.value)

    def _types_Subscript(self, node: ast.Subscript) -> Types:
        self.types(node.slice)
        return self._items(self.types(node.value))

    def _types_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Types:
        return collection(frozenset().union(*[self.types(item) for item in node.elts]))

    _types_List = _types_Set = _types_Tuple

    def _types_Dict(self, node: ast.Dict) -> Types:
        for key in node.keys:
            self.types(key)
        return collection(frozenset().union(*[self.types(value) for value in node.values]))

    def _types_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Types:
        self.scopes.append({})
        for generator in node.generators:
            self._bind(generator.target, self._items(self.types(generator.iter)), None)
            for condition in generator.ifs:
                self.types(condition)
        if isinstance(node, ast.DictComp):
            self.types(node.key)
        inner = self.types(node.value if isinstance(node, ast.DictComp) else node.elt)
        self.scopes.pop()
        return collection(inner)

    _types_SetComp = _types_GeneratorExp = _types_DictComp = _types_ListComp

    @staticmethod
    def _items(types: Types) -> Types:
        return frozenset(name[1:] for name in types if name.startswith("*"))

    def _resolve(self, types: Types) -> Types:
        return frozenset(
            "*" * stars + self.aliases.get(bare, bare)
            for name in types
            for bare in [name.lstrip("*")]
            for stars in [len(name) - len(bare)]
        )
