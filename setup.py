"""The part of the packaging that pyproject.toml cannot say.

`triton_kernels/` at the top level is installed as `sgl_kvfetch.triton_kernels`, and under that name only: a package
`triton_kernels` exists elsewhere, and SGLang asks whether it can be imported. `packages.find` and an explicit package
cannot be combined in pyproject.toml.

The native coder uses Python's stable interface alone: one wheel serves every Python from 3.11 on.
"""

from setuptools import Extension, find_namespace_packages, setup

packages = find_namespace_packages(include=["sgl_kvfetch", "sgl_kvfetch.*"])
ans = Extension(
    "sgl_kvfetch.codec.bitstream._ans",
    ["sgl_kvfetch/codec/bitstream/ans.cpp"],
    py_limited_api=True,
    extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
)
setup(
    packages=sorted({*packages, "sgl_kvfetch.triton_kernels"}),
    ext_modules=[ans],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
