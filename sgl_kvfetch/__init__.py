"""KV caches of SGLang on a store in your network, at two thirds of their size or a tenth."""

# The version of the next release, and `.dev0` until it is tagged. pyproject.toml reads it here. A test keeps the chart
# equal, and the workflow `release` refuses a tag of another one.
__version__ = "0.3.0.dev0"
