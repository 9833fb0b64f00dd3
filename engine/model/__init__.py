"""The hybrid KDA:MLA model: shapes, weights, cache layout and forward pass.

`config` and `layout` are torch-free; `weights` and `model` need torch.
"""
