# SPDX-License-Identifier: Apache-2.0
"""A deadline on every wait, as a checker over source text.

A call that can wait for ever is a fault unless it gets a timeout that is not None, or says why it may wait, on one of
its lines or on the line before::

    ray.get(ref)  # waits: until the job is over, which the master's lease bounds

The checker reads names, not types: it takes ``x.wait()`` for a wait whatever ``x`` is, and it cannot see
``with lock:``, calls of gRPC stubs, ``async for``, or a Ray reference awaited under a name that was bound elsewhere.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

MARK = "# waits:"

# Where a function takes its timeout: the index of the positional argument; None: as a keyword only.
FUNCTIONS = {
    "ray.get": None, "ray.wait": None, "asyncio.wait": None, "asyncio.wait_for": 1, "asyncio.as_completed": None,
    "concurrent.futures.wait": 1, "concurrent.futures.as_completed": 1, "multiprocessing.connection.wait": 1,
    "socket.create_connection": 1, "subprocess.call": None, "subprocess.check_call": None,
    "subprocess.check_output": None, "subprocess.run": None, "urllib.request.urlopen": 2,
}  # fmt: skip
# The same for methods. Those in the second table are waits only when they get no other argument: d.get(key), s.join(l).
METHODS = {"wait": 0, "result": 0, "wait_for": 1, "communicate": 1}
BARE_METHODS = {"get": 1, "join": 0}
# These take no timeout at all.
ENDLESS = {"recv", "recv_bytes", "accept"}
# Inside their arguments, or under such a block, every await has a deadline.
BOUNDED_CALLS = {"asyncio.wait_for", "asyncio.wait"}
BOUNDED_BLOCKS = {"asyncio.timeout", "asyncio.timeout_at"}


def wait_faults(path: str, source: str) -> list[str]:
    """Every wait without a deadline in a text; ``path`` is for the messages."""
    tree = ast.parse(source)
    excused = {number for number, line in enumerate(source.splitlines(), 1) if line.partition(MARK)[2].strip()}
    waits = _Waits(list(ast.walk(tree)))
    waits.visit(tree)
    return [
        f"{path}:{node.lineno}: {why}"
        for node, why in sorted(waits.faults, key=lambda fault: fault[0].lineno)
        if not excused & set(range(node.lineno - 1, (node.end_lineno or node.lineno) + 1))
    ]


def wait_faults_of_tree(root: Path) -> list[str]:
    """:func:`wait_faults` of every file of a folder."""
    texts = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.py"))}
    return [fault for name, text in texts.items() for fault in wait_faults(name, text)]


class _Waits(ast.NodeVisitor):
    """Collects the waits of a module that have no deadline."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        self.faults: list[tuple[ast.expr, str]] = []
        self._aliases = dict(_names(nodes))
        self._harmless = _context_variables(nodes)
        self._waited_for = _handed_on(nodes, self._aliases)
        self._bounded = 0
        self._references: set[str] = set()

    def visit_Call(self, node: ast.Call) -> None:
        name = _dotted(node.func, self._aliases)
        why = "" if self._bounded or name in self._harmless else _reason(node, name)
        if why:
            self.faults.append((node, why))
        self._visit_inside(node, name in BOUNDED_CALLS and not _reason(node, name))

    def _visit_inside(self, node: ast.AST, is_bounded: bool) -> None:
        self._bounded += is_bounded
        self.generic_visit(node)
        self._bounded -= is_bounded

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        names = [_dotted(item.context_expr, self._aliases) for item in node.items]
        self._visit_inside(node, not BOUNDED_BLOCKS.isdisjoint(names))

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if _is_reference(node.value):
            self._references |= names
        self._visit_inside(node, not names.isdisjoint(self._waited_for))

    def visit_Await(self, node: ast.Await) -> None:
        named = isinstance(node.value, ast.Name) and node.value.id in self._references
        if not self._bounded and (named or _is_reference(node.value)):
            self.faults.append((node, "a Ray reference is awaited without a deadline: asyncio.wait_for"))
        self.generic_visit(node)


def _reason(call: ast.Call, name: str) -> str:
    """Return the reason for which a call can wait for ever, or ``""`` if it cannot."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in FUNCTIONS:
        return "" if _has_timeout(call, FUNCTIONS[name]) else f"{name} without a timeout"
    if name in ("fcntl.flock", "fcntl.lockf"):
        text = ast.unparse(call)
        return "" if "LOCK_NB" in text or "LOCK_UN" in text else f"{name} without LOCK_NB"
    if method in METHODS:
        return "" if _has_timeout(call, METHODS[method]) else f".{method}() without a timeout"
    if method in BARE_METHODS:
        return _bare(call, method)
    if method in ENDLESS:
        return f".{method}() takes no timeout: poll for it first, and say so"
    if method == "poll" and call.args and _is_none(call.args[0]):
        return ".poll(None) waits for ever"
    if method == "acquire":
        return _acquire(call)
    return ""


def _bare(call: ast.Call, method: str) -> str:
    flags = all(isinstance(argument, ast.Constant) and argument.value is True for argument in call.args)
    more = {keyword.arg for keyword in call.keywords} - {"block", "timeout"}
    if more or not (flags or _has_timeout(call, BARE_METHODS[method])) or _says_no(call, "block"):
        return ""  # a lookup or a text's join
    return "" if _has_timeout(call, BARE_METHODS[method]) else f".{method}() without a timeout"


def _acquire(call: ast.Call) -> str:
    first = ast.unparse(call.args[0]) if call.args else ""
    at_once = first == "False" or _says_no(call, "blocking") or _says_no(call, "block")
    return "" if at_once or _has_timeout(call, 1) else ".acquire() without a timeout"


def _has_timeout(call: ast.Call, position: int | None) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg in ("timeout", "timeout_s", "deadline_s", None)]
    if position is not None:
        values += call.args[position : position + 1]
    return any(not _is_none(value) for value in values)


def _says_no(call: ast.Call, flag: str) -> bool:
    return any(word.arg == flag and ast.unparse(word.value) == "False" for word in call.keywords)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_reference(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "remote"


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """``concurrent.futures.wait`` for ``futures.wait`` if that was imported from there; ``""`` for no name."""
    if isinstance(node, ast.Call):
        return _dotted(node.func, aliases)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, aliases)
        return f"{before}.{node.attr}" if before else ""
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _context_variables(nodes: list[ast.AST]) -> set[str]:
    """``current.get`` for each ``current = ContextVar(...)``: it takes no argument and never waits."""
    bound = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)]
    calls = [
        node for node in bound if isinstance(node.value, ast.Call) and "ContextVar" in ast.unparse(node.value.func)
    ]
    targets = [target for node in calls for target in getattr(node, "targets", None) or [node.target]]
    return {f"{target.id}.get" for target in targets if isinstance(target, ast.Name)}


def _handed_on(nodes: list[ast.AST], aliases: dict[str, str]) -> set[str]:
    """Names given to a wait with a deadline: a coroutine may be made in one line and waited for in the next."""
    calls = [(node, _dotted(node.func, aliases)) for node in nodes if isinstance(node, ast.Call)]
    bounded = [call for call, name in calls if name in BOUNDED_CALLS and not _reason(call, name)]
    return {argument.id for call in bounded for argument in call.args if isinstance(argument, ast.Name)}


def _names(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
