"""The part of the packaging that pyproject.toml cannot say.

`triton_kernels/` at the top level is installed as `sgl_kvfetch.triton_kernels`, and under that name only: a package
`triton_kernels` exists elsewhere, and SGLang asks whether it can be imported. `packages.find` and an explicit package
cannot be combined in pyproject.toml.
"""

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["sgl_kvfetch", "sgl_kvfetch.*"])
setup(packages=sorted({*packages, "sgl_kvfetch.triton_kernels"}))
