"""Chosen plans outlive the process: files, shipped tables, the command. No GPU is asked for any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tune
from jax_swiglu import __main__, _ffi, _plans

MACHINE = ("NVIDIA H200", "9.0", 91900)
KEY = "glu_fwd batch=1 m=16 k=4096 n=14336"
CHOICE = {"route": "dual", "engines": ["eng7_k24=37"], "seconds": 5.8e-5}
OTHER = {"route": "pointwise", "engines": ["eng0", "eng0_k24=1", "eng1_k24=37"], "seconds": 1e-4}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The cache folder of a test, under an empty cache directory of its own."""
    monkeypatch.setenv("JAX_SWIGLU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_plans, "SHIPPED", tmp_path / "shipped")
    _plans.SHIPPED.mkdir()
    folder = _plans.cache_folder()
    restart(folder)
    yield folder
    restart("", "")


def restart(folder, shipped=None):
    """As a new process: memory is empty."""
    _ffi.set_plan_folders(str(folder), str(_plans.SHIPPED if shipped is None else shipped))


def put(choice=CHOICE, key=KEY, machine=MACHINE):
    _ffi.put_plan(*machine, key, *choice.values())


def find(key=KEY, machine=MACHINE):
    return {found.pop("source"): found for found in _ffi.find_plans(*machine, key)}


def table(choice=CHOICE, **changes):
    names = ("gpu", "compute_capability", "cudnn")
    return {
        "schema": _ffi.PLAN_SCHEMA,
        **dict(zip(names, MACHINE, strict=True)),
        "plans": {KEY: choice},
        **changes,
    }


def only_file(folder):
    (path,) = folder.glob("*/*")
    return path


def test_kept_in_memory_and_on_disk(folder):
    assert find() == {}
    put()
    assert find() == {"memory": CHOICE, "disk": CHOICE}
    restart(folder)
    assert find() == {"disk": CHOICE}


def test_the_last_one_wins(folder):
    put()
    put(OTHER)
    restart(folder)
    assert find() == {"disk": OTHER}
    only_file(folder)


@pytest.mark.parametrize(
    "machine",
    [("NVIDIA H100 80GB HBM3", "9.0", 91900), ("NVIDIA H200", "10.0", 91900),
     ("NVIDIA H200", "9.0", 92000)],
)  # fmt: skip
def test_another_gpu_or_cudnn_never_gets_it(folder, machine, capfd):
    put()
    (_plans.SHIPPED / "h200.json").write_text(json.dumps(table()))
    restart(folder)
    assert find(machine=machine) == {}
    assert find(key=KEY + " with gate, up") == {}
    assert capfd.readouterr().err == ""


def test_shipped_tables_come_last(folder):
    (_plans.SHIPPED / "h200.json").write_text(json.dumps(table()))
    assert find() == {"shipped": CHOICE}
    put(OTHER)
    restart(folder)
    assert list(find().items()) == [("disk", OTHER), ("shipped", CHOICE)]


def test_tables_that_are_shipped():
    for path in (Path(_plans.__file__).parent / "plans").glob("*.json"):
        plans = _plans.read(path)["plans"]
        assert plans
        for plan in plans.values():
            assert plan["seconds"] > 0
            assert all(_ffi.parse_engine(engine) for engine in plan["engines"])


GOOD = json.dumps(table())


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD[: len(GOOD) // 2],
        "\x00\xff",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps(table(schema=_ffi.PLAN_SCHEMA + 1)),
        json.dumps(table(gpu="NVIDIA A100")),
        json.dumps(table(plans=[])),
        json.dumps(table(plans={KEY: {**CHOICE, "engines": [1]}})),
        json.dumps(table(plans={KEY: {"route": "dual"}})),
        json.dumps({"schema": _ffi.PLAN_SCHEMA}),
    ],
    ids=lambda text: text[:12] + str(len(text)),
)
def test_damaged_files_are_ignored_with_one_line_and_replaced(folder, text, capfd):
    put()
    path = only_file(folder)
    path.write_text(text)
    restart(folder)
    assert find() == find() == {}
    (line,) = capfd.readouterr().err.splitlines()
    assert str(path) in line
    put(OTHER)
    restart(folder)
    assert find() == {"disk": OTHER}


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_folder_that_cannot_be_written(tmp_path, inside, capfd):
    (tmp_path / "file").write_text("")  # also root cannot make a folder under a file
    restart(tmp_path / "file" / inside)
    put()
    put(OTHER, key="another")
    assert find() == {"memory": CHOICE}
    (line,) = capfd.readouterr().err.splitlines()
    assert "not kept" in line


def test_a_file_is_none_that_must_be_waited_for(folder):
    put()
    path = only_file(folder)
    path.unlink()
    os.mkfifo(path)
    restart(folder)
    assert find() == {}


WRITER = """
import importlib.machinery, sys
path, folder, name = sys.argv[1:]
ffi = importlib.machinery.ExtensionFileLoader("_ffi", path).load_module()
ffi.set_plan_folders(folder, "")
for i in range(200):
    for key in ("shared", name):
        ffi.put_plan("gpu", "9.0", 1, key, name, [f"eng{i}"] * 50, i)
    ffi.set_plan_folders(folder, "")
    (found,) = ffi.find_plans("gpu", "9.0", 1, "shared")
    assert found["engines"] == [f"eng{found['seconds']:.0f}"] * 50, found
"""


def test_many_processes(folder):
    names = ["a", "b", "c", "d"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WRITER, _ffi.__file__, str(folder), name],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for process in processes:
        assert (process.communicate()[1], process.returncode) == ("", 0)
    for name in names:
        (found,) = _ffi.find_plans("gpu", "9.0", 1, name)
        assert (found["route"], found["seconds"]) == (name, 199)
    assert len(list(folder.glob("*/*"))) == len(names) + 1  # nothing temporary is left


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("eng0", (0, [])),
        ("eng4_k2=9_k24=46", (4, [(2, 9), (24, 46)])),
        ("eng12_k24=-1", (12, [(24, -1)])),
    ],
)
def test_engine_names(name, engine):
    assert _ffi.parse_engine(name) == engine


@pytest.mark.parametrize("name", ["", "INVALID_ENGINE_NAME_CFG", "eng4_k2", "eng4 k2=9", "eng0_"])
def test_names_that_are_none(name):
    with pytest.raises(ValueError, match=f"in {name}$"):
        _ffi.parse_engine(name)


# The cache directory.


def test_cache_directory(monkeypatch, tmp_path):
    version = f"v{_ffi.PLAN_SCHEMA}"
    assert _plans.cache_folder() == tmp_path / "cache" / version
    monkeypatch.setenv("JAX_SWIGLU_CACHE_DIR", "")
    assert _plans.cache_folder() is None
    monkeypatch.delenv("JAX_SWIGLU_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _plans.cache_folder() == tmp_path / "xdg" / "jax_swiglu" / version
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _plans.cache_folder() == tmp_path / ".cache" / "jax_swiglu" / version


def test_import_uses_the_cache_directory(run_python, folder):
    put()
    code = f"import jax_swiglu._ffi as f; print(f.find_plans(*{MACHINE!r}, {KEY!r})[0]['source'])"
    environment = {**run_python.keywords["env"], "JAX_SWIGLU_CACHE_DIR": str(folder.parent)}
    result = run_python([sys.executable, "-c", code], env=environment)
    assert (result.stdout, result.stderr) == ("disk\n", "")


# The command.


def test_list(folder, capsys):
    __main__.main(["plans", "list"])
    assert capsys.readouterr().out == "no plans\n"
    put()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "x.json").write_text("{")
    (_plans.SHIPPED / "h200.json").write_text(json.dumps(table(OTHER)))
    __main__.main(["plans", "list"])
    assert capsys.readouterr().out.splitlines() == [
        "NVIDIA H200, compute capability 9.0, cuDNN 9.19.0:",
        f"  {KEY}: route dual, 1 launch [eng7_k24=37], 58.0 us (disk)",
        f"  {KEY}: route pointwise, 3 launches [eng0, eng0_k24=1, eng1_k24=37], 100.0 us (shipped)",
    ]


def test_clear(folder, capsys):
    put()
    put(key="another")
    only = folder.parent / "not-ours.json"
    only.write_text("{}")
    __main__.main(["plans", "clear"])
    __main__.main(["plans", "clear"])
    assert capsys.readouterr().out == "2 files removed\n0 files removed\n"
    assert only.exists()
    restart(folder)
    assert find() == {}


def test_path(folder, capsys, monkeypatch):
    __main__.main(["plans", "path"])
    monkeypatch.setenv("JAX_SWIGLU_CACHE_DIR", "")
    __main__.main(["plans", "path"])
    __main__.main(["plans", "clear"])
    path, disabled, cleared = capsys.readouterr().out.splitlines()
    assert path == str(folder)
    assert "JAX_SWIGLU_CACHE_DIR is empty" in disabled
    assert cleared == "0 files removed"


def test_warm_needs_a_gpu():
    with pytest.raises(SystemExit, match="NVIDIA GPU only"):
        __main__.main(["plans", "warm", "--hidden", "64", "--intermediate", "64", "--rows", "1,2"])


# The script that makes tables to ship.


def test_a_table_is_made_of_files_and_found(folder):
    put()
    put(OTHER, key="another")
    put(OTHER, machine=("NVIDIA A100", "8.0", 91900))
    machine = dict(zip(("gpu", "compute_capability", "cudnn"), MACHINE, strict=True))
    path = _plans.SHIPPED / "h200.json"
    shapes = {tune.Case(4096, 14336, 16)}
    assert tune.tuned_before(path) == set()
    tune.write(tune.merge(machine, folder.glob("*/*.json")), shapes, path)
    assert tune.tuned_before(path) == shapes
    assert len(path.read_text().splitlines()) == 2 + 2  # one for each problem
    assert tune.merge(machine, [path]) == {
        "schema": _ffi.PLAN_SCHEMA,
        **machine,
        "plans": {"another": OTHER, KEY: CHOICE},
    }
    restart("")
    assert find() == {"shipped": CHOICE}
    assert find(key="another") == {"shipped": OTHER}
    assert list(_plans.SHIPPED.iterdir()) == [path]


def test_what_is_tuned_first():
    cases = list(tune.cases())
    assert len(set(cases)) == len(cases) == len(tune.SIZES) * 15
    assert {case.rows for case in cases} == {2**i for i in range(15)}
    first = cases[: 6 * tune.BENCHMARKED]
    assert {(5120, 17408), (4096, 14336), (896, 4864)} <= {case[:2] for case in first}
    assert {16, 2048, 8192} <= {case.rows for case in first}
