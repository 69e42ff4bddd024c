"""Everything that needs a GPU, tested and measured in one short run: kernels, NVDEC, memory, interference, SGLang.

    scripts/gpu_check [--out DIR] [--only STEP ...]

Each step runs in a process of its own with a time limit, and ends as passed, failed or skipped, with the reason: none
that crashes or hangs takes the others with it. What was found goes to ``docs/gpu/`` as a JSON file and a Markdown
page. Without a GPU all is skipped and named, and nothing is written unless ``--out`` says where.
"""
