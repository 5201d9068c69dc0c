"""What users of pip get: the wheel is complete, and works in an environment that never saw this folder."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import shortrun

ROOT = Path(__file__).parents[1]
SHIPPED = ("mnist-small", "svhn-small", "faces-small")
pytestmark = pytest.mark.slow


def run(*words, folder, **more):
    """Output of a command that knows nothing of this checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run([str(word) for word in words], cwd=folder, env=clean | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with sdist and wheel, the wheel made from the sdist; made of a copy, so that nothing is left here."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", source, folder=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An empty environment with the wheel, beside which the packages that it needs are visible, but not this checkout.

    A line of a .pth file adds a folder to the path, and does not read the .pth files in there: an editable install of
    this package stays out of sight.
    """
    folder = tmp_path_factory.mktemp("empty") / "env"
    venv.create(folder, symlinks=True)
    binaries = folder / ("Scripts" if os.name == "nt" else "bin")
    python = binaries / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel, folder=folder)
    (site,) = folder.rglob("site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(others))
    return python


def test_the_wheel_holds_every_file_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "shortrun"
    expected = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= names, sorted(expected - names)
    kept = {f"shortrun/{name}" for name in ("py.typed", "studio/studio.css", "studio/studio.js")}
    kept |= {f"shortrun/pretrained/{model}/model.safetensors" for model in SHIPPED}
    assert kept <= names
    assert not [name for name in names if not name.startswith(("shortrun/", f"shortrun-{shortrun.__version__}"))]


def test_what_an_index_shows_of_it(built, wheel):
    """`twine check` reads sdist and wheel as PyPI does; name, version and extras are what the documentation says."""
    files = sorted(built.iterdir())
    assert len(files) == 2
    report = run(sys.executable, "-m", "twine", "check", "--strict", *files, folder=built)
    assert report.count("PASSED") == 2
    found = message_from_string(
        zipfile.ZipFile(wheel).read(f"shortrun-{shortrun.__version__}.dist-info/METADATA").decode()
    )
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("shortrun", shortrun.__version__, "MIT")
    assert {"all", "flows", "metrics", "digits", "hub", "studio"} <= set(found.get_all("Provides-Extra"))


def test_the_citation_names_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == shortrun.__version__
    assert f"\n## {shortrun.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_in_an_empty_environment(installed, tmp_path):
    code = (
        f"import shortrun; models = [shortrun.load(name) for name in {SHIPPED}]; print(shortrun.__file__);"
        "[print(*(tuple(layer.shape) for layer in model.infer(model.sample(2)))) for model in models]"
    )
    place, *latents = run(installed, "-c", code, folder=tmp_path).splitlines()
    assert Path(place).is_relative_to(installed.parents[1])
    assert latents == ["(2, 10) (2, 16) (2, 30)", *2 * ["(2, 32) (2, 64) (2, 128)"]]


def test_its_console_script(installed, tmp_path):
    command = installed.parent / "shortrun"
    assert run(command, "--version", folder=tmp_path).split()[:2] == ["shortrun", shortrun.__version__]
    run(command, "sample", "mnist-small", "--images", "10", "--out", "pictures", folder=tmp_path)
    assert (tmp_path / "pictures" / "samples.png").is_file()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_shell_completes_commands_flags_and_values(installed, tmp_path):
    script = run(installed.parent / "shortrun", "--completion", "bash", folder=tmp_path)
    (tmp_path / "completion.bash").write_text(script)
    ask = 'source completion.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tyro_shortrun; '
    ask += r'printf "%s\n" "${COMPREPLY[@]}"'

    def completed(*words):
        return run("bash", "-c", ask, "bash", "shortrun", *words, folder=tmp_path).split("\n")[:-1]

    assert completed("tra") == ["train", "traverse"]
    assert completed("evaluate", "--qu") == ["--quiet-steps"]
    assert completed("train", "--method", "ladder") == ["ladder-vae"]
    assert all(flag.startswith("--") for flag in completed("train", "--"))
