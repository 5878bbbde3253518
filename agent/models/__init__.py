"""Networks, one paper in a file, in plain PyTorch: no custom kernel, no torchvision, nothing unpickled.

Every network takes images as :func:`agent.models.image_tensors.to_tensor` gives them, and lives in one file of the
form of :mod:`agent.models.weights`, which says what it is and where it comes from.
"""
