"""Integrations import public names only, and the library imports no framework."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("langchain", "llama_index", "langgraph", "langsmith", "vllm", "llama_cpp")
MODULES = sorted(
    path
    for folder in (
        "langchain-ragaccel/langchain_ragaccel",
        "llama-index-llms-ragaccel/src",
        "vllm-ragaccel/vllm_ragaccel",
    )
    for path in (ROOT / "integrations" / folder).rglob("*.py")
)


def imports_of(path):
    """Every module imported in a file, with the names taken from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_integration_uses_only_what_packages_offer(path):
    for module, name in imports_of(path):
        if module.split(".")[0] == "ragaccel":
            assert module.count(".") < 2, f"{module}: import from its package"
            offered = getattr(import_module(module), "__all__", (name,))
            assert name in (*offered, "__version__")
            assert not (name or "").startswith("_")


def test_the_library_imports_no_framework():
    for path in (ROOT / "ragaccel").rglob("*.py"):
        for module, _ in imports_of(path):
            assert not module.startswith(FRAMEWORKS), f"{path} imports {module}"


def test_all_integrations_are_looked_at():
    assert {path.relative_to(ROOT).parts[1] for path in MODULES} == {
        "langchain-ragaccel",
        "llama-index-llms-ragaccel",
        "vllm-ragaccel",
    }
    assert not list((ROOT / "integrations").glob("*/__init__.py"))
