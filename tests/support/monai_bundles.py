"""Three MONAI bundles of the published form, written from MONAI's bundle specification: nobody's files are copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = {
    "imports": ["$import glob", "$import os"],
    "bundle_root": ".",
    "ckpt_dir": "$@bundle_root + '/models'",
    "dataset_dir": "/data/made",
    "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
    "network": "$@network_def.to(@device)",
    "optimizer": {"_target_": "torch.optim.Adam", "params": "$@network.parameters()", "lr": 0.001},
    "initialize": ["$monai.utils.set_determinism(seed=123)"],
    "run": ["$@train::trainer.run()"],
}
TRAINED: Final = {
    "preprocessing": {
        "_target_": "Compose",
        "transforms": "$@train::deterministic_transforms + @train::random_transforms",
    },
    "dataset": {"_target_": "Dataset", "data": "$@train_items", "transform": "@train::preprocessing"},
    "dataloader": {"_target_": "DataLoader", "dataset": "@train::dataset", "batch_size": 4, "shuffle": True},
    "inferer": {"_target_": "SimpleInferer"},
    "handlers": [
        {"_target_": "StatsHandler", "output_transform": "$monai.handlers.from_engine(['loss'], first=True)"}
    ],
    "trainer": {
        "_target_": "SupervisedTrainer",
        "max_epochs": 5,
        "device": "@device",
        "train_data_loader": "@train::dataloader",
        "network": "@network",
        "loss_function": "@loss",
        "optimizer": "@optimizer",
        "train_handlers": "@train::handlers",
    },
}
VALIDATED: Final = {
    "preprocessing": {"_target_": "Compose", "transforms": "%train::deterministic_transforms"},
    "evaluator": {"_target_": "SupervisedEvaluator", "network": "@network", "device": "@device"},
}
BOTH: Final = ["image", "label"]


def metadata(modality: str, shape: list[int], classes: list[str], *, patches: bool = False) -> dict[str, Any]:
    """``configs/metadata.json``."""
    told = {"type": "image", "format": "magnitude", "modality": modality, "num_channels": 1, "spatial_shape": shape}
    more = {"dtype": "float32", "value_range": [0, 1], "is_patch_data": patches}
    named = {str(at): name for at, name in enumerate(classes)}
    return {
        "version": "0.1.0",
        "monai_version": "1.6.1",
        "task": "made",
        "description": "made for a test",
        "authors": "nobody",
        "copyright": "nobody",
        "network_data_format": {
            "inputs": {"image": {**told, **more, "channel_def": {"0": "image"}}},
            "outputs": {"pred": {**told, **more, "num_channels": len(classes), "channel_def": named}},
        },
    }


def classification() -> dict[str, dict[str, Any]]:
    """DenseNet-121 of grey pictures, four classes."""
    network = {"_target_": "DenseNet121", "spatial_dims": 2, "in_channels": 1, "out_channels": "@classes"}
    fixed = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Resized", "keys": "image", "spatial_size": [64, 48], "mode": "bilinear"},
        {"_target_": "ScaleIntensityd", "keys": "image"},
        {"_target_": "EnsureTyped", "keys": "image"},
    ]
    drawn = [
        {"_target_": "RandFlipd", "keys": "image", "spatial_axis": 0},
        {"_target_": "RandGaussianNoised", "keys": "image", "prob": 0.15, "std": 0.01},
    ]
    train = {
        **ROOT,
        "classes": 4,
        "network_def": network,
        "loss": {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1},
        "train": {"deterministic_transforms": fixed, "random_transforms": drawn, **TRAINED},
        "validate": VALIDATED,
    }
    return {"train": train, "metadata": metadata("X-ray", [64, 48], ["hand", "chest", "head", "breast"])}


def flat_segmentation() -> dict[str, dict[str, Any]]:
    """A U-Net of pictures, as an inference bundle."""
    inference = {
        **ROOT,
        "network_def": {
            "_target_": "monai.networks.nets.UNet",
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "channels": [8, 16, 32],
            "strides": [2, 2],
            "num_res_units": 2,
        },
        "loss": {"_target_": "DiceLoss", "to_onehot_y": True, "softmax": True},
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "LoadImaged", "keys": "image"},
                {"_target_": "EnsureChannelFirstd", "keys": "image"},
                {"_target_": "NormalizeIntensityd", "keys": "image", "channel_wise": True},
            ],
        },
        "dataset": {"_target_": "Dataset", "data": "$[{'image': i} for i in @datalist]"},
        "evaluator": {"_target_": "SupervisedEvaluator", "network": "@network", "val_handlers": "$@handlers"},
    }
    return {"inference": inference, "metadata": metadata("MR", [32, 32], ["background", "lesion"])}


def deep_segmentation() -> dict[str, dict[str, Any]]:
    """A SegResNet of CT volumes, of the old reference signs."""
    fixed = [
        {"_target_": "LoadImaged", "keys": BOTH},
        {"_target_": "EnsureChannelFirstd", "keys": BOTH},
        {"_target_": "Orientationd", "keys": BOTH, "axcodes": "RAS"},
        {"_target_": "Spacingd", "keys": BOTH, "pixdim": "@pixdim", "mode": ["bilinear", "nearest"]},
        {
            "_target_": "ScaleIntensityRanged", "keys": "image",
            "a_min": -57, "a_max": 164, "b_min": 0, "b_max": 1, "clip": True,
        },
        {"_target_": "ResizeWithPadOrCropd", "keys": BOTH, "spatial_size": [32, 24, 16]},
        {"_target_": "EnsureTyped", "keys": BOTH},
    ]  # fmt: skip
    drawn = [
        {"_target_": "RandFlipd", "keys": BOTH, "prob": 0.2, "spatial_axis": 2},
        {
            "_target_": "RandAffined", "keys": BOTH, "prob": 0.5, "rotate_range": [0.1, 0.2, 0.3],
            "scale_range": [0.1, 0.2, 0.3], "mode": ["bilinear", "nearest"],
        },
    ]  # fmt: skip
    train = {
        **ROOT,
        "pixdim": [1.5, 1.5, 2.0],
        "network_def": {
            "_target_": "SegResNet",
            "spatial_dims": 3,
            "init_filters": 8,
            "in_channels": 1,
            "out_channels": 2,
            "blocks_down": [1, 2, 4],
            "blocks_up": [1, 1],
        },
        "loss": {"_target_": "DiceCELoss", "to_onehot_y": True, "softmax": True, "squared_pred": True, "batch": True},
        "train": {"deterministic_transforms": fixed, "random_transforms": drawn, **TRAINED},
        "validate": {**VALIDATED, "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [96, 96, 96]}},
    }
    return {"train": train, "metadata": metadata("CT", [96, 96, 96], ["background", "spleen"], patches=True)}


BUNDLES: Final = {
    "classification": classification,
    "flat_segmentation": flat_segmentation,
    "deep_segmentation": deep_segmentation,
}


def write_bundle(folder: Path, configs: dict[str, dict[str, Any]], *, form: str = "json") -> Path:
    """The folder of a bundle."""
    for name in ("configs", "models", "docs"):
        (folder / name).mkdir(parents=True)
    for name, value in configs.items():
        text = (
            json.dumps(value, indent=2)
            if form == "json" or name == "metadata"
            else yaml.safe_dump(json.loads(json.dumps(value)))
        )
        (folder / "configs" / f"{name}.{'json' if name == 'metadata' else form}").write_text(text)
    (folder / "docs" / "README.md").write_text("# Made\n")
    (folder / "LICENSE").write_text("none\n")
    return folder
