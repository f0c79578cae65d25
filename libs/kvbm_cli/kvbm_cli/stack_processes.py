"""Stack processes: which ones run for each kind of service, and how their settings differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbm_common.config.settings import Settings
from kvbm_common.wire.operator_verbs import TIERS

from kvbm_cli.disk_stores import directories_by_number


def processes_of(kind: str, settings: Settings) -> dict[str, dict[str, str]]:
    """Return the processes of a kind, by name, each with the variables that differ from the others.

    One of each kind, and a disk tier per directory: a disk that hangs delays no other. As many
    host tiers as are wanted; an object tier only where it is enabled; an index for each partition.
    """
    if kind == "object-tier" and not settings.object_enabled:
        return {}
    if kind == "disk-tier":
        size, slots = settings.disk_cache_gb, settings.disk_cache_override_num_blocks
        own = [
            {"DYN_KVBM_DISK_CACHE_DIR": str(directory)} | _numbered(number, settings)
            for number, directory in directories_by_number(settings).items()
        ]
        return _shared_out(kind, settings, own, "DYN_KVBM_DISK_CACHE", size, slots)
    if kind == "host-tier":
        size, slots = settings.cpu_cache_gb, settings.cpu_cache_override_num_blocks
        own = [{} for _ in range(settings.host_tiers)]
        if settings.instance.isdigit():  # As replicas of a container are numbered.
            first = int(settings.instance)
            own = [{"KVBM_INSTANCE": str(first + number)} for number in range(len(own))]
        return _shared_out(kind, settings, own, "DYN_KVBM_CPU_CACHE", size, slots)
    if kind == "index" and settings.index_partitions > 1:
        return {
            f"{kind}-{number}" if number else kind: {
                "KVBM_INDEX_PARTITION": str(number),
                "KVBM_INSTANCE": f"{settings.instance}-{number}" if number else settings.instance,
            }
            for number in range(settings.index_partitions)
        }
    return {kind: {}}


def _shared_out(
    kind: str,
    settings: Settings,
    own: Sequence[Mapping[str, str]],
    prefix: str,
    size_gb: float,
    slots: int | None,
) -> dict[str, dict[str, str]]:
    """Return several processes of a kind, each with an equal share of the size."""
    count = len(own)
    if count == 1 and own[0].get("KVBM_INSTANCE", settings.instance) == settings.instance:
        return {kind: {}}
    shared = {
        f"{prefix}_GB": str(size_gb / count),
        f"{prefix}_OVERRIDE_NUM_BLOCKS": "" if slots is None else str(slots // count),
    }
    return {
        f"{kind}-{number}" if number else kind: shared
        | _numbered(number, settings)
        | dict(variables)
        for number, variables in enumerate(own)
    }


def _numbered(number: int, settings: Settings) -> dict[str, str]:
    """Return the variable with the instance that has a number in a stack."""
    own = settings.instance
    return {"KVBM_INSTANCE": f"{own}-{number}" if number else own}


def port_of(number: int, settings: Settings) -> dict[str, str]:
    """Return the variable with the HTTP port of a stack's n-th process; all share one address."""
    return (
        {"KVBM_SERVICE_PORT": str(settings.service_port + number)} if settings.service_port else {}
    )


def all_instances(settings: Settings) -> list[str]:
    """Return every instance of a tier that a stack of these settings may run."""
    found = (instance for kind in TIERS for instance in instances_of(kind, settings))
    return list(dict.fromkeys((settings.instance, *found)))


def instances_of(kind: str, settings: Settings) -> list[str]:
    """Return the instances of a kind that a stack of these settings runs."""
    own = processes_of(kind, settings).values()
    return [variables.get("KVBM_INSTANCE", settings.instance) for variables in own]


def without_size(settings: Settings) -> list[str]:
    """Return a line for each tier that keeps no block because of its settings."""
    found: list[str] = []
    if not settings.cpu_cache_gb and not settings.cpu_cache_override_num_blocks:
        found.append("the host tier keeps no blocks: DYN_KVBM_CPU_CACHE_GB is 0")
    if not settings.disk_cache_gb and not settings.disk_cache_override_num_blocks:
        found.append("the disk tier keeps no blocks: DYN_KVBM_DISK_CACHE_GB is 0")
    if len(found) == 2 and not settings.object_enabled:
        found.append("no tier keeps blocks: give one of them a size, and engines have a cache")
    return found
