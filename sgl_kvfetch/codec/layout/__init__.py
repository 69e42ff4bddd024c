"""Layouts: bijections between integers and frames."""
