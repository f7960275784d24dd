# SPDX-License-Identifier: Apache-2.0
"""Test files that programs are scored by, and programs that score themselves."""

from functools import partial

import pytest

from dlrover.python.rl.environment.verifiers import code
from dlrover.python.rl.environment.verifiers.code import ProgramLimits, python_tests
from dlrover.python.rl.environment.verifiers.hidden_tests import CHECKED, hide_expected

RIGHT = """
from dataclasses import dataclass
def add(a, b):
    if a is None:
        raise ValueError("no number")
    return a + b
async def slow_add(a, b): return a + b
def half(a): return a / 2
def read(): return [input() for _ in range(2)]
def build(value): return Node(value)
@dataclass
class Token:
    text: str
def tokens(text): return [Token(word) for word in text.split()]
class Pot:
    def __init__(self): self.items = []
    def add(self, a, b): return a + b
    def put(self, item): self.items.append(item)
    def __contains__(self, item): return item in self.items
    def __len__(self): return len(self.items)
"""
WRONG = """
class Token: pass
class Pot:
    def add(self, a, b): return 7
    def put(self, item): pass
    def __contains__(self, item): return False
    def __len__(self): return 7
def add(a, b): return 7
async def slow_add(a, b): return 7
def half(a): return 7
def read(): return []
def build(value): return Pot()
def tokens(text): return [Pot()]
"""
SUITE = "import unittest\nclass Check(unittest.TestCase):\n    def test_add(self):\n        "
PYTEST = "import pytest\n"
ONE = "def test_add():\n    assert add(20, 3) == 23\n"
CALLED = "def run():\n    assert add(20, 3) == 23\n"
CHECK = "def check(candidate):\n    assert candidate(20, 3) == 23\n"

FORMS = {
    "functions only": ONE,
    "a statement beside functions": "import random\nrandom.seed(4)\n" + ONE,
    "an object beside functions": "pot = Pot()\ndef test_add():\n    assert pot.add(20, 3) == 23\n",
    "an optional import": "try:\n    import nowhere\nexcept ImportError:\n    nowhere = None\n" + ONE,
    "an asynchronous function": "async def test_add():\n    assert await slow_add(20, 3) == 23\n",
    "a decorated function": (PYTEST + "@pytest.mark.parametrize('a, c', [(1, 4), (20, 23)])\n"
        "def test_add(a, c):\n    assert add(a, 3) == c\n"),
    "a name twice": "def test_add():\n    assert add(1, 1) == 3\n" + ONE,
    "a function and a class": (ONE.replace("add(20, 3) == 23", "add(3, 4) == 7")
        + "class TestAdd:\n    def test_add(self):\n        assert add(20, 3) == 23\n"),
    "a class with a setup": ("class TestPot:\n    def setup_method(self):\n        self.pot = Pot()\n"
        "    def test_put(self):\n        self.pot.put(3)\n        assert 3 in self.pot\n"),
    "an inherited method": ("class Base:\n    def test_add(self):\n        assert add(20, 3) == self.sum\n"
        "class TestAdd(Base):\n    sum = 23\n"),
    "a class in a class": ("class TestAll:\n    class TestAdd:\n        def test_add(self):\n"
        "            assert add(20, 3) == 23\n"),
    "unittest": SUITE + "self.assertEqual(add(20, 3), 23)\n",
    "unittest, set up": (SUITE.replace("def test", "def setUp(self): self.pot = Pot()\n    def test")
        + "self.assertTrue(self.pot.add(20, 3) == 23)\n"),
    "unittest, a loop": (SUITE + "for a in range(3):\n            with self.subTest(a=a):\n"
        "                self.assertEqual(add(a, 1), a + 1)\n"),
    "unittest, nearly": SUITE + "self.assertAlmostEqual(half(0.3), 0.15)\n",
    "unittest, other methods": (SUITE + "self.assertCountEqual([add(1, 2), 4], [4, 3])\n"
        "        self.assertEqual(first=add(20, 3), second=23)\n"),
    "unittest, asynchronous": (SUITE.replace("Test", "IsolatedAsyncioTest").replace("def test", "async def test")
        + "self.assertEqual(await slow_add(20, 3), 23)\n"),
    "unittest.main(exit=False)": SUITE + "self.assertEqual(add(20, 3), 23)\nunittest.main(exit=False)\n",
    "a runner that is not read": (SUITE + "self.assertEqual(add(20, 3), 23)\nloader = unittest.TestLoader()\n"
        "unittest.TextTestRunner().run(loader.loadTestsFromTestCase(Check))\n"),
    "a runner that is read": (SUITE + "self.assertEqual(add(20, 3), 23)\nif __name__ == '__main__':\n    import sys\n"
        "    sys.exit(not unittest.main(exit=False).result.wasSuccessful())\n"),
    "a guard with calls": CALLED + "if __name__ == '__main__':\n    run()\n",
    "a guard with pytest": (ONE + "if __name__ == '__main__':\n    import sys, pytest\n"
        "    sys.exit(pytest.main([__file__]))\n"),
    "a guard the other way round": CALLED + "if '__main__' == __name__:\n    for f in [run]:\n        f()\n",
    "raise SystemExit": "assert add(20, 3) == 23\nraise SystemExit\n",
    "an exit status": "import sys\nsys.exit(0 if add(20, 3) == 23 else 1)\n",
    "an exit in a function": ("def main():\n    if add(20, 3) != 23:\n        exit(1)\n"
        "    assert add(1, 1) == 2\nmain()\n"),
    "from solution import add": "from solution import add\n" + ONE,
    "import solution as s": "import solution as s\ndef test_add():\n    assert s.add(20, 3) == 23\n",
    "from main import add as f": "from main import add as f\ndef test_add():\n    assert f(20, 3) == 23\n",
    "check(candidate)": "METADATA = dict(author='x')\n" + CHECK,
    "check(candidate) with a helper": ("def near(a, b): return abs(a - b) < 1e-6\n"
        + CHECK.replace("candidate(20, 3) == 23", "near(candidate(20, 3), 23)")),
    "a table": "for a, c in [(1, 4), (20, 23)]:\n    assert add(a, 3) == c\n",
    "swallowed failures": ("bad = 0\nfor a, c in [(1, 4), (20, 23)]:\n    try:\n        assert add(a, 3) == c\n"
        "    except AssertionError:\n        bad += 1\nprint(bad)\n"),
    "an expected error": "try:\n    add(None, 1)\n    assert False, 'none'\nexcept ValueError:\n    pass\n",
    "pytest.raises": (PYTEST + "def test_add():\n    with pytest.raises(ValueError, match='no num') as info:\n"
        "        add(None, 1)\n    assert 'number' in str(info.value)\n"),
    "assertRaises": SUITE + "self.assertRaises(ValueError, add, None, 1)\n",
    "pytest.approx": (PYTEST + "def test_half():\n    third = 0.3\n    assert half(third) == pytest.approx(0.15)\n"
        "    assert [half(third)] == pytest.approx([third / 2])\n"),
    "numpy.testing": ("import numpy as np\nnp.testing.assert_allclose(add(np.ones(2), 3), [4, 4])\n"
        "assert (add(np.ones(2), 3) == np.array([4, 4])).all()\n"),
    "objects of the program": "assert tokens('a b') == [Token('a'), Token('b')]\nassert not Pot()\n",
    "a class of the tests": ("class Node:\n    def __init__(self, value): self.value = value\n"
        "assert build(3).value == 3\n"),
    "patched input": ("from unittest.mock import patch\ndef test_read():\n"
        "    with patch('builtins.input', side_effect='ab'):\n        assert read() == ['a', 'b']\n"),
    "decimals and infinity": ("from decimal import Decimal\nassert add(Decimal('0.5'), 0) == 0.5\n"
        "assert add(1, Decimal(2)) == 3\nassert add(1e999, 0) == 1e999\n"
        "assert (add(Decimal('0.1'), 0) == 0.1) is False\n"),
    "objects that differ": (SUITE + "self.assertNotEqual(tokens('a'), tokens('b'))\n        "
        "self.assertNotIn(tokens('a')[0], tokens('b'))\n        " "self.assertGreater(add(20, 3), 22)"),
    "a raised assertion": ("for a in (1, 2):\n    if add(a, 3) != a + 3:\n        a = 0\n        raise AssertionError\n"
        "if add(20, 3) != 23:\n    raise AssertionError\n"),
    "failing where anything is raised": (SUITE + "try:\n            tokens('a')[0].text\n"
        "        except Exception:\n            self.fail('x')"),
    "named arguments of parametrize": (PYTEST + "@pytest.mark.parametrize(argnames='a', argvalues=[20], "
        "scope='module')\ndef test_add(a):\n    assert add(a, 3) == 23\n"),
    "what an exception says": (PYTEST + "def test_none():\n    with pytest.raises(ValueError) as raised:\n"
        "        add(None, 1)\n    raised.match('no n')\n    assert raised.typename == 'ValueError'\n"),
    "an assertion 100,000 times": "for _ in range(100_000): assert add(20, 3) == 23",
    "a method of pytest": ("class TestAdd:\n    def setup_method(self, method):\n        self.a = 20\n"
        "    def test_add(self):\n        assert add(self.a, 3) == 23\n"),
    "marks that change nothing": (PYTEST + "@pytest.mark.asyncio\n@pytest.mark.timeout(5)\nasync def test_add():\n"
        "    assert await slow_add(20, 3) == 23\n"),
    "a function of numpy": "from numpy.testing import assert_allclose\nassert_allclose(add(20, 3), 23)\n",
    "lines": ["assert add(20, 3) == 23", "assert add(1, 1) == 2"],
}  # fmt: skip

REFUSED = {
    "nothing": ("# nothing", "could fail"),
    "an expression": ("add(20, 3) == 23", "could fail"),
    "a function that nothing calls": ("import random\nrandom.seed(4)\n" + CALLED, "could fail"),
    "a constant": ("add(20, 3)\nassert True", "could fail"),
    "output": ("if add(20, 3) == 23:\n    print('right')", "could fail"),
    "an unknown candidate": (CHECK, r"could fail: extra_info\['entry_point'\] must name"),
    "unknown cases": ('{"ins": ["1"], "outs": ["2"]}', "must be Python text, or a list of"),
    "a fixture": ("def test_add(tmp_path):\n    assert add(20, 3) == 23", "the fixture 'tmp_path'"),
    "a fixture of a method": ("class TestA:\n    def test_add(self, pot):\n        assert pot", "the fixture 'pot'"),
    "pytest.fixture": (PYTEST + "@pytest.fixture\ndef pot(): return Pot()\n" + ONE, "the tests use pytest.fixture"),
    "pytest.mark.skip": (PYTEST + "@pytest.mark.skip\n" + ONE, "the tests use pytest.mark.skip,"),
    "from pytest import mark": ("from pytest import mark\n" + ONE, "the tests use pytest.mark as a name"),
    "a class with parameters": (PYTEST + "@pytest.mark.parametrize('a', [1])\nclass TestA: pass\n" + ONE, "of a class"),
    "expected failures": (SUITE.replace("    def", "    @unittest.expectedFailure\n    def") + "pass", "expectedF"),
    "skipTest": (SUITE + "self.skipTest('x')", "the tests use self.skipTest"),
    "a module": ("from nowhere.at import add\n" + ONE, "the tests import nowhere.at, which is not installed"),
}


def fenced(program):
    return f"```python\n{program}\n```"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(code, "ProgramLimits", partial(ProgramLimits, timeout_s=60.0))


@pytest.mark.feature(98)
@pytest.mark.parametrize("form", FORMS)
def test_hidden_tests_of_every_form_tell_right_from_wrong(form):
    extra_info = {"tests": FORMS[form], "entry_point": "add"}
    assert [python_tests(fenced(program), None, extra_info) for program in (RIGHT, WRONG)] == [1.0, 0.0]


@pytest.mark.parametrize("tests", REFUSED)
def test_hidden_tests_not_run_whole_are_refused(tests):
    text, message = REFUSED[tests]
    for completion in (fenced(RIGHT), "no program"):
        with pytest.raises(ValueError, match=message):
            python_tests(completion, None, {"tests": text})


def test_hidden_tests_of_a_local_module_are_refused():
    with pytest.raises(ValueError, match="import import_rules .*, which fails in the program's process"):
        python_tests(fenced(RIGHT), None, {"tests": "import import_rules\n" + ONE})


@pytest.mark.parametrize("tests", ["for x in numbers():\n    assert x == 1", "def f(): assert g() == 1\nif g(): f()"])
def test_hidden_tests_without_an_assertion_are_no_pass(tests):
    assert python_tests(fenced("def numbers(): return []\ndef g(): return 0"), None, {"tests": tests}) == 0.0
    assert python_tests(fenced("def numbers(): return [1]\ndef g(): return 1"), None, {"tests": tests}) == 1.0


def test_hidden_assertions_on_every_path_are_due():
    tests = SUITE + "self.assertEqual(add(1, 2), 3)\n        self.assertIn(add(1, 2), given)\n" + ONE + "assert add\n"
    hidden = hide_expected(tests)
    assert hidden.expected == (3, CHECKED, 23, CHECKED)
    assert hidden.due == {0, 1, 2, 3}
    assert "23" not in hidden.text


# one kind of assertion each, for 20 first, so that a program may earn trust.
LOOP = "for a in (20, 1):\n    "
CHEATED = {
    "functions": "def test_add():\n    for a in (20, 1):\n        result = add(a, 3)\n        assert result == a + 3\n",
    "unittest": SUITE + "self.assertEqual(add(20, 3), sum([20, 3]))\n    def test_more(self):\n"
    "        self.assertEqual(add(1, 1), sum([1, 1]))\n",
    "unittest, nearly": SUITE + "for a in (20, 1): self.assertAlmostEqual(add(a, 1), a + 1)\n",
    "literals": "assert add(20, 3) == 23\nassert add(1, 1) == 2\n",
    "containers": "from solution import add\n" + LOOP + "assert [add(a, 3)] == [a + 3]\n"
    "    assert {add(a, 3)} == {a + 3}\n    assert {add(a, 3): 1} == {a + 3: 1}\n    assert add(a, 3) in [a + 3]\n",
    "all": LOOP + "assert all([add(a, 3) == sum([a, 3])])\n",
    "abs": LOOP + "assert abs(add(a, 3) - sum([a, 3])) < 1e-6\n",
    "isclose": "import math\n" + LOOP + "assert math.isclose(add(a, 3), sum([a, 3]))\n",
    "not": LOOP + "assert not add(a, 3) != sum([a, 3])\n",
    "a method": "for a in ('x', 'y'):\n    assert add(a, 'z').startswith(a)\n",
    "a check": CHECK + "    ok = candidate(1, 1) == sum([1, 1])\n    assert ok\n",
    "an exit": "import sys\n" + LOOP + "assert add(a, 3) == sum([a, 3])\nsys.exit(0)\n",
    "errors": PYTEST + "def test_add():\n    with pytest.raises(ValueError):\n        add(None, 3)\n"
    "    for a in (20, 1):\n        assert add(a, 3) == pytest.approx(a + 3)\n",
}
NOTHING = "def add(a, b): return None\n"
ONCE = "def add(a, b):\n    if a == 20: return a + b\n"
EVERYTHING = """
class Everything:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __rsub__ = __abs__ = __round__ = lambda *_: 0
    __hash__ = lambda self: 23
    __float__ = lambda self: 23.0
    __getattr__ = lambda self, name: lambda *_, **named: self
"""
LIES = """__eq__ = __le__ = __lt__ = __gt__ = __ge__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __rsub__ = lambda *_: 0
    __hash__ = lambda self: 23
    __repr__ = lambda self: '23'
"""
SEEK = """
import gc, inspect, os, re, sys

def seen():
    files = ["program.py", sys.argv[0], getattr(sys.modules["__main__"], "__file__", "program.py")]
    files += ["/proc/self/cmdline", "/proc/self/environ"] + [f"/proc/self/fd/{n}" for n in (0, 1, 2)]
    for file in files:
        try:
            yield open(file, errors="replace").read()
        except OSError:
            pass
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals) + repr(frame.f_globals) + repr(frame.f_code.co_consts)
        frame = frame.f_back
    yield repr(gc.get_objects()) + repr(dict(os.environ)) + repr(sys.argv)

def tell():
    for text in seen():
        for token in re.findall("[0-9a-f]{32}", text):
            print(token, flush=True)
            for number in range(3, 16):
                try:
                    os.write(number, f"over {token}\\n".encode())
                except OSError:
                    pass
"""
CHEATS = {
    "seeks what passes": SEEK + "tell()\nos._exit(0)",
    "seeks what passes in the function": SEEK + "def add(a, b):\n    tell()\n    os._exit(0)",
    "says so everywhere": "import os\nfor number in range(1, 16):\n"
    "    try: os.write(number, b'ran\\nover\\nover \\n')\n    except OSError: pass\nos._exit(0)\n",
    "replaces all functions": "import builtins, os, sys\n"
    "builtins.exec = builtins.compile = builtins.eval = lambda *_, **named: None\n"
    "builtins.print = builtins.exit = builtins.isinstance = lambda *_: True\nsys.exit = lambda *_: os._exit(0)\n"
    "builtins.AssertionError = os._exit\ndef add(a, b): return 0\n",
    "exits at import": "import sys\nsys.exit(0)",
    "ends at import": "import os\nos._exit(0)",
    "ends at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "exits in the function": "def add(a, b): raise SystemExit(0)",
    "interrupts": "def add(a, b): raise KeyboardInterrupt",
    "skips": "import unittest\ndef add(a, b): raise unittest.SkipTest('x')",
    "equals everything": EVERYTHING + "def add(a, b): return Everything()",
    "is a class that equals everything": EVERYTHING.replace("Everything:", "add:\n    def __init__(self, *_): pass"),
    "says that it is an int": EVERYTHING + "class Int(Everything):\n    __class__ = int\n    __module__ = 'builtins'\n"
    "    __qualname__ = 'int'\ndef add(a, b): return Int()",
    "is an int that lies": f"class Int(int):\n    {LIES}def add(a, b): return Int(7)",
    "is a str that lies": f"class Str(str):\n    {LIES}def add(a, b): return Str('7')",
    "is a Mock": "from unittest.mock import MagicMock\ndef add(a, b):\n    mock = MagicMock(spec=int)\n"
    "    mock.__eq__ = lambda *_: True\n    return mock",
    "is ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "replaces builtins": "import builtins\nfor name in ('all', 'any', 'isinstance', 'bool', 'print', 'open'):\n"
    "    setattr(builtins, name, lambda *_: True)\nbuiltins.abs = builtins.sum = builtins.round = lambda *_: 0\n"
    "builtins.AssertionError = builtins.Exception = SystemExit\nbuiltins.exec = builtins.compile = print\n" + NOTHING,
    "replaces builtins in the function": "import builtins\ndef add(a, b):\n"
    "    builtins.all = builtins.isinstance = builtins.bool = lambda *_: True\n"
    "    builtins.abs = lambda *_: 0\n    return a + b if a == 20 else None\n",
    "has names of builtins": "def all(*_): return True\nany = isinstance = bool = all\ndef abs(*_): return 0\n"
    "sum = len = round = lambda *_: None\nclass AssertionError(BaseException): pass\n" + NOTHING,
    "replaces assertions of unittest": "import unittest\nfor name in dir(unittest.TestCase):\n"
    "    if name.startswith('assert') or name in ('fail', 'run', '__call__'):\n"
    "        setattr(unittest.TestCase, name, lambda *_, **named: None)\n" + NOTHING,
    "replaces them in the function": "import unittest\n" + ONCE + "    for name in dir(unittest.TestCase):\n"
    "        if name.startswith('assert'): setattr(unittest.TestCase, name, lambda *_, **named: None)\n",
    "runs one test": "import unittest\nrun = unittest.TestCase.run\nunittest.TestCase.run = lambda self, result=None: "
    "run(self, result) if self.id().endswith('add') else None\n" + ONCE,
    "replaces results": "import unittest\nfor name in dir(unittest.TestResult):\n    if name.startswith('add'):\n"
    "        setattr(unittest.TestResult, name, lambda *_, **named: None)\n" + NOTHING,
    "replaces modules": "import sys, types\nclass Fake(types.ModuleType):\n    TestCase = object\n"
    "    def __getattr__(self, name): return lambda *_, **named: True\n"
    "sys.modules.update({name: Fake(name) for name in ('unittest', 'pytest', 'math', 'json', 're')})\n" + NOTHING,
    "replaces functions of modules": "import json, math, ast\nmath.isclose = lambda *_, **named: True\n"
    "json.loads = ast.literal_eval = lambda *_: 23\n" + NOTHING,
    "replaces what it finds beside it": ONCE + "    for name in [*globals()]:\n        if name[:2] == '__':\n"
    "            globals()[name] = lambda *_, **named: True\n",
    "defines what it would find": "__check__ = __compare__ = __holds__ = __passed__ = lambda *_: True\n" + NOTHING,
    "writes to the channel from a thread": "import os, threading\ndef shout():\n"
    "    for number in [*range(3, 20)] * 50:\n"
    "        try: os.write(number, b'passed 0\\npassed 1\\ncompared 0 23\\nover \\n')\n        except OSError: pass\n"
    "threading.Thread(target=shout, daemon=True).start()\n" + NOTHING,
    "reads files": "import os, re\ndef add(a, b):\n    found = []\n"
    "    for folder in ('.', '/proc/self', '/proc/self/fd'):\n"
    "        for name in os.listdir(folder):\n            path = os.path.join(folder, name)\n"
    "            if os.path.isfile(path): found += re.findall(r'== (\\d+)', open(path, errors='replace').read())\n"
    "    return int(found[0])",
    "skips lines of its caller": "import sys\ndef skip(frame, event, argument):\n    try: frame.f_lineno += 1\n"
    "    except ValueError: pass\n    return skip\n" + ONCE + "    sys.settrace(skip)\n    frame = sys._getframe(1)\n"
    "    while frame:\n        frame.f_trace, frame = skip, frame.f_back\n",
    "skips all lines": "import sys\ndef skip(frame, event, argument):\n    try: frame.f_lineno += 1\n"
    "    except ValueError: pass\n    return skip\nsys.settrace(skip)\n" + NOTHING,
}  # fmt: skip


@pytest.mark.feature(98)
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] * (form not in ("functions", "unittest"))) for form in CHEATED]
)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_program_earns_nothing(cheat, form):
    assert python_tests(fenced(CHEATS[cheat]), None, {"tests": CHEATED[form], "entry_point": "add"}) == 0.0


@pytest.mark.parametrize("form", CHEATED)
def test_honest_program_passes(form):
    assert python_tests(fenced(RIGHT), None, {"tests": CHEATED[form], "entry_point": "add"}) == 1.0


FRAMES = """
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        values = [*frame.f_locals.values(), *frame.f_code.co_consts]
        found = [value for value in values if type(value) is int and value > 1 and value not in (a, b)]
        if found: return found[0]
        frame = frame.f_back
"""


@pytest.mark.parametrize("tests", [CHEATED["literals"], SUITE + "self.assertEqual(add(20, 3), 23)\n"])
def test_program_reading_frames_finds_no_literal(tests):
    assert python_tests(fenced(FRAMES), None, {"tests": tests}) == 0.0
