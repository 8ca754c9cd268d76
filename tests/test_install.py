"""What installing depends on: pins that agree with one another and with what torch asks for."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# What the ordinary Linux wheel of a torch release requires, exactly. A CPU wheel's own metadata
# names no triton, so that the torch installed here may not tell.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}
CONSTRAINTS = pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])


def pins(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(requirement.specifier).startswith("==") for requirement in requirements)
    return {
        re.sub(r"[-_.]+", "-", requirement.name).lower(): str(requirement.specifier)[2:]
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    }


@CONSTRAINTS
def test_triton_is_the_one_that_torch_requires(name):
    pinned = pins(name)
    assert pinned["torch"] in TRITON_OF_TORCH, "add what this torch's ordinary wheel requires"
    wanted = TRITON_OF_TORCH[pinned["torch"]]
    assert pinned.get("triton", wanted) == wanted


@CONSTRAINTS
def test_no_pin_contradicts_what_another_pinned_release_requires(name):
    pinned, checked, wrong = pins(name), 0, []
    for package, version in pinned.items():
        try:
            installed = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        if installed.version.split("+")[0] != version:
            continue  # of another release nothing is known
        for line in installed.requires or ():
            needed = Requirement(line)
            pin = pinned.get(re.sub(r"[-_.]+", "-", needed.name).lower())
            if pin is None or (needed.marker and not needed.marker.evaluate({"extra": ""})):
                continue
            checked += 1
            if not needed.specifier.contains(pin, prereleases=True):
                wrong.append(f"{package}=={version} requires {needed}, pinned is {pin}")
    assert checked > 5  # fewer in an environment without pins
    assert not wrong
