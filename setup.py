"""The part of the packaging that pyproject.toml cannot say.

`triton_kernels/` at the top level is installed as `sgl_kvfetch.triton_kernels`, and under that name only: a package
`triton_kernels` exists elsewhere, and SGLang asks whether it can be imported. `packages.find` and an explicit package
cannot be combined in pyproject.toml.

The native modules use Python's stable interface alone: one wheel serves every Python from 3.11 on.
"""

from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

packages = find_namespace_packages(include=["sgl_kvfetch", "sgl_kvfetch.*"])
extensions = [
    Extension(
        f"sgl_kvfetch.codec.{folder}._{name}",
        [f"sgl_kvfetch/codec/{folder}/{name}.cpp"],
        depends=[str(header) for header in Path("sgl_kvfetch/codec", folder).glob("*.h")],
        py_limited_api=True,
        # No fused multiply-adds: results are the same on every CPU. These modules parse what stores have: where one has
        # a fault, the process had better end than do what somebody else wants.
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-fstack-protector-strong",
            "-U_FORTIFY_SOURCE",
            "-D_FORTIFY_SOURCE=2",
        ],
        extra_link_args=["-Wl,-z,relro,-z,now,-z,noexecstack"],
    )
    for folder, name in (("bitstream", "ans"), ("quant", "exact"), ("quant", "klt"))
]
setup(
    packages=sorted({*packages, "sgl_kvfetch.triton_kernels"}),
    ext_modules=extensions,
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
