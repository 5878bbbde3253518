from __future__ import annotations

import re
from pathlib import Path

import coordinator
from coordinator.federation.strategy import MISSING
from coordinator.round_codes import explain_code
from protos.federation.messages import CODES


def test_every_code_of_a_round_has_its_sentence() -> None:
    """The codes of sites, and those that the coordinator's own modules give."""
    source = "".join(
        (Path(coordinator.__file__).parent / "federation" / name).read_text()
        for name in ("strategy.py", "secure_strategy.py", "replies.py", "run_controller.py", "run_process.py")
    )
    given = set(re.findall(r'_fail\([^,]+, "([a-z_]+)"', source)) | set(
        re.findall(r'InvalidReplyError\("([a-z_]+)"\)', source)
    )
    given |= set(re.findall(r'_lost\[site\] = "([a-z_]+)"', source))
    given |= {"another_round", "not_granted", "not_finite", MISSING}
    assert {"too_few_grants", "schema"} <= given
    for code in sorted(given | set(CODES)):
        why, todo = explain_code(code)
        assert why, code
        assert "recorded as" not in why, code
        assert todo, code
        assert "See its refusals" not in todo, f"{code}: a researcher reads this page too, and no refusal"
    assert explain_code("a_new_code")[0] == "The reason is recorded as “a_new_code”."
