def restore(
    tokens: int,
    heads: int,
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
    /,
) -> None:
    """Write K and V, ``(tokens, heads, dim)``, heads of all layers. Types: 0 float32, 1 bfloat16, 2 float16. The last
    six are addresses of contiguous tensors: float32 but for the product, ``(tokens, channels)``, K and V."""
