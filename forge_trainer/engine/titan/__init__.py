"""TitanEngine: TorchTitan's components behind the `Engine` protocol.

The only package that imports torchtitan. Differences between CPU and GPU are settled here.
"""
