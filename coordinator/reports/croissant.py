"""One admitted set of images for data catalogues: MLCommons Croissant 1.0, see :mod:`coordinator.pools.datasheet`.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.pools.datasheet import CONFORMS_TO, CONTEXT, STEM, Card, File, file_object


def croissant_of_set(card: Card, archive: File, promised: str) -> dict[str, Any]:
    """One admitted set of images as a Croissant 1.0 dataset: the shard, and in it each image and its label.

    Args:
        card: what the operator says of it.
        archive: the artifact itself.
        promised: what is promised to the patients, in the words of its level.
    """
    texts = {"license": card.license, "citeAs": card.cite_as, "url": card.url, "datePublished": card.published}

    def inside(name: str, includes: str, encoding: str, text: str) -> dict[str, Any]:
        names = {"@type": "cr:FileSet", "@id": name, "name": name, "description": text}
        return {**names, "containedIn": {"@id": archive.name}, "encodingFormat": encoding, "includes": includes}

    def records(name: str, what: str, kind: str, text: str) -> dict[str, Any]:
        def field(part: str, data: str, words: str, source: Mapping[str, Any]) -> dict[str, Any]:
            names = {"@type": "cr:Field", "@id": f"{name}/{part}", "name": part, "description": words}
            return {**names, "dataType": data, "source": {"fileSet": {"@id": name}, **source}}

        stem = {"extract": {"fileProperty": "filename"}, "transform": {"regex": STEM}}
        fields = [
            field("key", "sc:Text", "The sample's number.", stem),
            field(what, kind, text, {"extract": {"fileProperty": "content"}}),
        ]
        names = {"@type": "cr:RecordSet", "@id": f"{name}-records", "name": f"{name}-records"}
        return {**names, "key": {"@id": f"{name}/key"}, "field": fields}

    labels = records("labels", "label", "sc:Text", "The label that the hospital gave the image of the same number.")
    images = records("images", "image", "sc:ImageObject", "A synthetic image, 8 bits a channel.")
    images["field"][0]["references"] = {"field": {"@id": "labels/key"}}
    return {
        "@context": dict(CONTEXT),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": card.name,
        "description": card.description,
        "version": card.version,
        **{name: text for name, text in texts.items() if text},
        **({"creator": {"@type": "sc:Organization", "name": card.creator}} if card.creator else {}),
        "rai:personalSensitiveInformation": promised,
        "distribution": [
            file_object(archive, "application/x-tar"),
            inside("images", "*.png", "image/png", "The images."),
            inside("labels", "*.txt", "text/plain", "The label of each."),
        ],
        "recordSet": [images, labels],
    }
