"""Networks, one paper in a file, in plain PyTorch: no custom kernel, no torchvision, nothing unpickled.

Every network takes pictures as :func:`agent.nets.pictures.to_tensor` gives them, and lives in one file of the form of
:mod:`agent.nets.weights`, which says what it is and where it comes from.
"""
