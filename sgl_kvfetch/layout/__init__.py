"""The bijection between integers and frames."""
