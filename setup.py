"""Everything static is in pyproject.toml; only the list of packages is here.

The top-level folder ``configs/`` (data only) is installed as ``inductor_fusions/configs``, and
pyproject.toml has no way to add one mapped folder to the packages that are found by name.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["inductor_fusions", "inductor_fusions.*", "inductor_fusions_hooks"]),
        "inductor_fusions.configs",
    ],
    package_dir={"inductor_fusions.configs": "configs"},
)
