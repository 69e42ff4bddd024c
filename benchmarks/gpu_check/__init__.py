"""Tests and measures everything that needs a GPU in one short run: kernels, loads, memory, SGLang.

    scripts/gpu_check [--out DIR] [--only STEP ...]
    scripts/gpu_check --bundle DIR    # pack what a machine without a network needs

Each step runs in its own process with a time limit, so a step that crashes or hangs does not affect the others. It ends
as passed, failed or skipped, with the reason. The results go to ``out/`` as a JSON file and a Markdown page.
Without a GPU, every GPU step is reported as skipped, and results are written only if ``--out`` is given.
"""
