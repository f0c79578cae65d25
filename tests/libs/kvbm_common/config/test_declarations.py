"""The declared settings: each has a variable of its own, with one of our prefixes."""

from __future__ import annotations

from kvbm_common.config.declarations import all_settings


def test_every_setting_is_told_apart() -> None:
    variables = [declared.variable for declared in all_settings()]
    assert len(set(variables)) == len(variables) > 30
    foreign = {name for name in variables if not name.startswith(("DYN_KVBM_", "KVBM_"))}
    assert foreign == {"ETCD_ENDPOINTS"}, "Dynamo's name"
