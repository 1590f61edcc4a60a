"""The package's build. Settings of the developer tools live in the dotfiles beside it."""

from pathlib import Path

from setuptools import find_packages, setup

TEST = ["pytest>=8", "pytest-xdist>=3.5"]

setup(
    name="layerzero",
    version="0.1.0",
    description="A ZeRO-3 engine on flat parameters for PyTorch",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["layerzero", "layerzero.*"]),
    package_data={"layerzero": ["py.typed"]},
    install_requires=["torch>=2.11", "numpy"],
    extras_require={
        "examples": ["tqdm", "matplotlib"],
        "test": TEST,
        "dev": [*TEST, "ruff", "mypy"],
    },
)
