"""Types: 0 float32, 1 bfloat16, 2 float16. A product is float32 or bfloat16. Numbers named after tensors are addresses;
the tensors are contiguous, and float32 unless it says otherwise. ``heads``: of all layers of a cell. ``pairs``: of
channels of a K head that rotate; ``table`` has ``(rotations, tokens, 2 * pairs)``, and is not read if there are none.
``turns``: int64 ``(layers,)``, which rotation each layer has. A cell's ``channels`` are those of K, then those of V."""

def restore(
    tokens: int,
    heads: int,
    layers: int,
    k_dim: int,
    v_dim: int,
    pairs: int,
    is_interleaved: bool,
    product_type: int,
    type: int,
    product: int,
    scales: int,
    mean: int,
    table: int,
    k: int,
    v: int,
    turns: int,
    /,
) -> None:
    """Write K and V, ``(tokens, heads, dim)``, from ``product``, ``(tokens, channels)``."""

def restore_integers(
    tokens: int,
    heads: int,
    layers: int,
    k_dim: int,
    v_dim: int,
    pairs: int,
    is_interleaved: bool,
    type: int,
    row_stride: int,
    row_pairs: int,
    rare: int,
    is_portable: bool,
    scales: int,
    mean: int,
    table: int,
    k: int,
    v: int,
    integers: int,
    frequent_rows: int,
    shifts: int,
    rare_rows: int,
    frequent: int,
    rare_matrix: int,
    units: int,
    turns: int,
    /,
) -> None:
    """Write K and V from ``integers``, uint8 ``(rows, tokens)``, whose rows are ``row_stride`` bytes apart. The rest:
    see IntegerMatrix, with its ``row_pairs`` of frequent rows and its ``rare`` rows. The portable half computes the
    same, to the bit."""

def centre(
    tokens: int,
    heads: int,
    layers: int,
    k_dim: int,
    v_dim: int,
    pairs: int,
    is_interleaved: bool,
    product_type: int,
    type: int,
    mean: int,
    table: int,
    k: int,
    k_token_stride: int,
    k_layer_stride: int,
    v: int,
    v_token_stride: int,
    v_layer_stride: int,
    centred: int,
    log_norms: int,
    turns: int,
    /,
) -> bool:
    """Write the values without rotation and mean, ``(tokens, channels)`` of ``product_type``, and the logarithms of
    the norms of heads of K, then V, ``(tokens, 2 * heads)``. Strides are in bytes; a layer's heads are contiguous.
    Return whether all values are finite; if not, the rest is undefined."""

def round_steps(
    tokens: int,
    heads: int,
    columns: int,
    kept: int,
    wide: int,
    sinks: int,
    step: float,
    most_cost: float,
    product_type: int,
    product: int,
    inverse_spread: int,
    weights: int,
    limits: int,
    which: int,
    bits: int,
    log_norms: int,
    exponents: int,
    integers: int,
    doubtful: int,
    /,
) -> None:
    """Write ``exponents``, uint8 ``(tokens,)``, ``integers``, uint8 ``(kept + wide, tokens)``, and ``doubtful``, bool
    ``(tokens,)``, from ``product``, ``(tokens, columns)``: see `_Forward`. ``inverse_spread``: ``(kept,)``.
    ``weights``: ``(kept + 2 * heads + 1,)``. ``limits``: ``(kept,)``. ``which`` and ``bits``: int64 ``(wide,)``. The
    first ``sinks`` tokens are exact."""
