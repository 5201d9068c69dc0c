"""Rules of the house that a machine can check: imports point one way, files stay short, the map of the code is true."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shortrun

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shortrun"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(("shortrun", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in FILES
}
# Each part may import those before it; the core, nothing but itself.
ORDER = (
    "settings", "limits", "core", "files", "processes", "progress", "masks", "pictures", "data", "metrics",
    "nets", "priors", "inverse", "learners", "training", "hub", "loading", "measured", "restoring", "trained",
    "own_data", "fitting", "for_deepinv", "studies", "studio", "cli", "__main__",
)  # fmt: skip
MOST_LINES = 410


def part_of(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path, also_later: bool = True) -> Iterator[str]:
    """Every module that a file imports, in functions too unless only what is imported at once is wanted.

    Names of the package's top are traced to their home; what only type checkers import does not count.
    """
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if node.module == "shortrun" and inner not in MODULES:
                    home = shortrun._HOMES.get(alias.name)
                    inner = "shortrun" if home is None else f"shortrun.{home}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += node.orelse
        elif also_later or not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)


def imports_of_the_package(path: Path, also_later: bool = True) -> Iterator[str]:
    return (name for name in imports(path, also_later) if name.partition(".")[0] == "shortrun")


def test_every_part_has_its_place_in_the_order():
    parts = {part_of(module) for module in MODULES if module != "shortrun"}
    assert parts == set(ORDER)


@pytest.mark.parametrize("module", [module for module in MODULES if module != "shortrun"])
def test_imports_point_one_way(module):
    part = part_of(module)
    for name in imports_of_the_package(MODULES[module]):
        if name == "shortrun":  # all of it, lazily: for those who come after everything that it offers
            assert part in ("studies", "cli"), f"{module} imports the whole package"
            continue
        assert part_of(name) in ORDER[: ORDER.index(part) + 1], f"{module} imports {name}"


def test_the_core_needs_torch_alone():
    for path in (PACKAGE / "core").glob("*.py"):
        foreign = {name.partition(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert foreign <= {"torch", "shortrun"}, path


def test_no_module_imports_itself_in_a_circle():
    graph = {name: set(imports_of_the_package(path, also_later=False)) - {"shortrun"} for name, path in MODULES.items()}
    finished: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " imports ".join((*above, module))
        if module not in finished:
            for name in graph[module]:
                visit(name, (*above, module))
            finished.add(module)

    for module in graph:
        visit(module, ())


def test_importing_the_package_imports_torch_and_the_core_alone():
    code = "import sys, shortrun; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {part_of(name) for name in found if name.startswith("shortrun.")}
    assert ours <= {"core"}
    heavy = {"accelerate", "datasets", "matplotlib", "PIL", "rich", "safetensors", "scipy", "tyro", "yaml", "zuko"}
    assert not heavy & set(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_short(path):
    lines = path.read_text().count("\n")
    assert lines <= MOST_LINES


def names_in_the_map() -> set[str]:
    """What is in backticks in the first column of the table under "Map of the code"."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Map of the code")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name.removeprefix("src/shortrun/").rstrip("/") for cell in cells for name in re.findall("`([^`]+)`", cell)}


def test_the_map_of_the_code_is_the_folder():
    """Each file of the package, and each package inside a package, has its line; each line has its file."""
    listed = {path.relative_to(PACKAGE) for path in FILES}
    listed |= {Path(path.parent) for path in listed if len(path.parts) > 2}
    expected = {
        path.as_posix() for path in listed if len(path.parts) <= 2 and path.name not in ("__init__.py", "__main__.py")
    }
    names = names_in_the_map()
    assert expected <= names, f"without a line: {sorted(expected - names)}"
    stale = [name for name in names if not (PACKAGE / name).exists() and not (ROOT / name).exists()]
    assert not stale
