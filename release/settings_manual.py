"""The manual page `docs/configuration.md`, written from the declared settings."""

from __future__ import annotations

from itertools import groupby

from kvbm_common.config.declarations import all_settings
from kvbm_common.config.schema import NO_EFFECT, NO_EFFECT_PREFIXES, Setting
from kvbm_common.config.settings import FILE_VARIABLE

_TITLES = {
    "host_tier": "Host tier (G2)",
    "disk_tier": "Disk tier (G3)",
    "object_tier": "Object tier (G4)",
    "tenants": "Tenants",
    "transfers": "Transfers and leases",
    "metrics": "Metrics and admin API",
    "consolidator": "Consolidator",
    "bus": "Bus and registry",
    "general": "This machine",
    "access": "Credentials and keys",
}

_INTRODUCTION = f"""# Configuration

<!-- Written by `python -m release.settings_manual` from kvbm_common/config/declarations.py. -->

A value comes from the first of: the command line, an environment variable, the TOML file that
`{FILE_VARIABLE}` names, the default. An empty variable counts as unset. The file has one table per
section below; its keys are the names in the column *in the file*. `kvbm config` prints the values
in force and where each one comes from.

Every value is checked at start: a value that does not fit ends the process with an error that
names the variable and what it accepts; a name that begins with `DYN_KVBM_` or `KVBM_` and is
unknown is warned about. `DYN_KVBM_*` mean what they mean in NVIDIA's KVBM, with three differences:
a boolean is parsed, so `false` is false; `DYN_KVBM_METRICS` is true unless set; sizes may have
decimals. 1 GB is 1,000,000,000 bytes.
"""


def render() -> str:
    """Return the whole manual page."""
    parts = [_INTRODUCTION]
    for section, settings in groupby(all_settings(), key=lambda declared: declared.section):
        parts.append(f"## {_TITLES[section]}: `[{section}]`\n")
        parts.append("| variable | in the file | default | accepts | |")
        parts.append("|---|---|---|---|---|")
        parts.extend(_row(declared) for declared in settings)
        parts.append("")
    parts.append("## Names of KVBM without effect here\n")
    parts.append("They are accepted with a warning.\n")
    names = NO_EFFECT | {f"{prefix}*": why for prefix, why in NO_EFFECT_PREFIXES.items()}
    parts.extend(f"- `{name}`: {why}" for name, why in names.items())
    return "\n".join(parts) + "\n"


def _row(declared: Setting) -> str:
    default = declared.default_text
    if declared.unit and default:
        default = f"{default} {declared.unit}"
    cells = [
        f"`{declared.variable}`",
        f"`{declared.name}`",
        default or "–",
        declared.parser.accepts.replace("|", "\\|"),
        declared.help,
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(render(), end="")
