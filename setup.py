"""What pyproject.toml cannot say: the folder recipes/ is installed too, as megatron_rl/recipes, so that recipes can be named
from any folder (`megatron-rl train cpu/quickstart.yaml`)."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["megatron_rl*"]), "megatron_rl.recipes"],
    package_dir={"megatron_rl.recipes": "recipes"},
)
