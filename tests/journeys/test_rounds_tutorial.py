"""The tutorial of rounds.md, typed from the table of labels to the model, beside two hospitals that serve."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any, Final

import pytest
from pydicom import dcmread

from deploy.demo.own_policies import amended
from tests.support.page_reader import ROOT, PageReader, blocks

PAGE: Final = (ROOT / "deploy" / "docs" / "rounds.md").read_text()
TUTORIAL: Final = PAGE[PAGE.index("## Tutorial") : PAGE.index("## The commands")]
SITES: Final = ("site-a", "site-b")
DECLARED, TASK = range(2)  # the TOML blocks of the page


class Reader(PageReader):
    """Who types the tutorial in the folder in which all homes lie."""

    def prepare(self) -> None:
        """The page's files, a table of each hospital's patients, and the officer whom one hospital wants to ask."""
        PageReader.prepare(self)
        (self.work / "digits.toml").write_text(blocks(TUTORIAL, "toml")[TASK])
        (self.work / "job.json").write_text(blocks(TUTORIAL, "json")[0])
        for site in SITES:
            self._table(site)
        policy = self.work / "site-a" / "policy.toml"
        policy.write_text(amended(policy.read_text(), {"run_approvals": '["compliance"]'}))
        self.run(self.agent("site-a", "ledger", "amend"))
        public = self.run(self.agent("site-a", "ledger", "person", str(self.key("dpo-a")))).strip()
        self.run(self.agent("site-a", "ledger", "appoint", "dpo-a", "compliance", public))
        shutil.copy(self.key("dpo-a"), self.work / "dpo-a.key")
        self.work.chmod(0o700)  # a key in a folder that others can read is refused

    def _table(self, site: str) -> None:
        pacs, tables = self.work / "pacs" / site, self.work / "tables" / site
        with (pacs / "labels.csv").open(newline="") as stream:
            digits = {row["sop_instance_uid"]: row["label"] for row in csv.DictReader(stream)}
        named: dict[str, str] = {}
        for path in sorted(pacs.glob("*/*/IM*.dcm")):
            header = dcmread(path, stop_before_pixels=True)
            named[str(header.PatientID)] = digits[str(header.SOPInstanceUID)]
        tables.mkdir(parents=True)
        (tables / "forms.toml").write_text(blocks(TUTORIAL, "toml")[DECLARED])
        with (tables / "forms.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("patient", "digit"), *named.items()])

    def wait_for_images(self, site: str, images: int) -> None:
        """Until the vault has what lies in the hospital's folder."""
        until = time.monotonic() + 300
        while True:
            rows = json.loads(self.type(f"lazaret-agent --home {site} cohort --json"))
            if sum(row["instances"] for row in rows if row["modality"] == "OT") == images:
                return
            assert time.monotonic() < until, f"{site}: {rows}"
            time.sleep(1)

    def wait_for_plan(self) -> None:
        """Until the hospital's people can see the run."""
        until = time.monotonic() + 180
        while "digits-1" not in self.type("lazaret-agent --home site-a run list"):
            assert time.monotonic() < until, "no plan arrived"
            time.sleep(1)


def test_the_tutorial_has_the_files_that_it_names() -> None:
    assert len(blocks(TUTORIAL, "toml")) == 2
    job: dict[str, Any] = json.loads(blocks(TUTORIAL, "json")[0])
    assert job["config"]["task"] == "digits.toml"
    assert f"`{job['parameters']}`" in TUTORIAL or f", {job['parameters']}." in TUTORIAL
    pictures = re.findall(r"\((pictures/[\w.-]+)\)", TUTORIAL)
    assert len(pictures) == 2
    assert all((ROOT / "deploy" / "docs" / name).stat().st_size < 60_000 for name in pictures)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_tutorial_of_rounds_works_as_written(enrolled: Path, tmp_path: Path) -> None:
    """All `sh` blocks of rounds.md, in order."""
    table, check, cohort, simulate, plan, ready, canary, launch, approve, watch, model = blocks(TUTORIAL, "sh")
    with Reader.copied(enrolled, tmp_path / "reader", 3) as reader:
        reader.serve()
        reader.prepare()
        for site in SITES:
            reader.start(site, reader.agent(site, "serve", "--modality", "OT"), "link: online")
        for site in SITES:
            reader.wait_for_images(site, 60)
        reader.type(table)
        assert "650" in reader.type(check)
        assert re.search(r"\b30 patients", reader.type(cohort))
        assert "data:image/png" in (reader.work / "sheet.html").read_text()
        said = reader.type(simulate)
        for word in ("epsilon 1 ", "epsilon 8 ", "without privacy", "UCI Optical Recognition"):
            assert word in said, word
        assert (reader.work / "simulation" / "epsilons.png").stat().st_size > 5_000
        assert "can go" in reader.type(plan)
        said = reader.type(ready)
        assert "all of them could take part" in said
        assert "persons decide" in said
        assert "Mbit/s" in said
        said = reader.type(canary)
        assert "the round went through at every site" in said
        assert said.count(": aggregated; ") == len(SITES)
        following = reader.begin(launch.replace(" &\n", "\n"))
        reader.wait_for_plan()
        reader.type(approve.rstrip() + " --yes\n")  # at a terminal the officer is asked
        said = reader.type(watch)
        assert "finished" in said
        assert "accuracy" in said
        assert following.communicate(timeout=300)[0]
        assert following.returncode == 0
        assert "certificate" in reader.type(model)
