"""Pods of the Helm chart under Docker: the same images, users, variables, mounts and probes.

A sandbox has the address of each pod, and its containers join it, as a kubelet has it. Directories
stand for hostPath, emptyDir, claims and Secrets, with the owners and modes that they have there.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.compose.engine import docker
from tests.compose.project import wait_until
from tests.helm.chart import Document, Pod, environ_of
from tests.helm.checks import bytes_of
from tests.helm.mounts import NODE, mounted_files

GROUP = 10001
ASK = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout=2)"
Mount = tuple[str, Path, bool]
"""Path in the container, what is mounted there, and whether it is read-only."""


class RunningPod:
    """One replica of a pod template."""

    def __init__(
        self, template: Pod, name: str, *, network: str, directory: Path, node: Path,
        configuration: dict[str, str],
    ) -> None:  # fmt: skip
        self.name = name
        self._template = template
        self._directory = directory / name
        self._node = node
        self._configuration = configuration
        self.sandbox = f"{network}-{name}"
        self._network = network

    def id_of(self, container: str) -> str:
        """Return the name under which Docker knows a container."""
        return f"{self.sandbox}-{container}"

    @property
    def containers(self) -> list[Document]:
        """Containers that stay."""
        return self._template.containers

    def start(self) -> None:
        """Start the sandbox, run the init containers to their end, and start the others."""
        docker(
            "run", "--detach", "--name", self.sandbox, "--network", self._network,
            "--network-alias", f"{self.name}.kvbm-nats", "--entrypoint", "sleep",
            self.containers[0]["image"], "infinity",
        )  # fmt: skip
        for container in self._template.spec.get("initContainers", ()):
            docker("run", "--rm", *self._options(container), *self._command(container))
        for container in self.containers:
            name = ("--name", self.id_of(container["name"]))
            docker("run", "--detach", *name, *self._options(container), *self._command(container))

    def _options(self, container: Document) -> list[str]:
        spec = self._template.spec
        context = spec["securityContext"] | container["securityContext"]
        capabilities = context["capabilities"]
        words = [
            "--network", f"container:{self.sandbox}",
            "--user", f"{context['runAsUser']}:{context['runAsGroup']}",
            "--cap-drop", *capabilities["drop"], "--pids-limit", "512",
            "--memory", str(bytes_of(container["resources"]["limits"]["memory"])),
            *[f"--cap-add={name}" for name in capabilities.get("add", ())],
            *["--security-opt", "no-new-privileges"],
            *(["--read-only"] if context["readOnlyRootFilesystem"] else []),
            *(["--ipc", "host"] if spec.get("hostIPC") else []),
            *(["--pid", "host"] if spec.get("hostPID") else []),
        ]  # fmt: skip
        for name, text in environ_of(
            container, spec_nodeName=NODE, metadata_name=self.name
        ).items():
            words += ["--env", f"{name}={text}"]
        for path, source, is_read_only in self._mounts(container):
            words += ["--volume", f"{source}:{path}{':ro' if is_read_only else ''}"]
        return words

    def _command(self, container: Document) -> list[str]:
        first, *rest = container.get("command", [""])
        entry = ["--entrypoint", first] if first else []
        return [*entry, container["image"], *rest, *container.get("args", ())]

    def _mounts(self, container: Document) -> list[Mount]:
        files = mounted_files(self._template, container)
        found: list[Mount] = []
        for mount in container["volumeMounts"]:
            path, volume = mount["mountPath"], self._template.volume(mount["name"])
            place = self._directory / mount["name"]
            if "hostPath" in volume:
                place = self._node / mount["name"]
                place.mkdir(exist_ok=True)
            elif "secret" in volume:
                place = self._directory / container["name"] / mount["name"]
                _write(place, path, files)
                place = place / Path(path).name if path in files else place
            elif "configMap" in volume:
                place = place / mount["subPath"]
                _write(place.parent, path, {path: self._configuration[mount["subPath"]]})
            elif not place.exists():  # An emptyDir, or a claim.
                place.mkdir(parents=True)
                os.chown(place, 0, GROUP)
                place.chmod(0o2777)
            found.append((path, place, bool(mount.get("readOnly"))))
        return found

    def passes(self, container: Document, probe: str = "readinessProbe") -> bool:
        """Ask as a kubelet does; without such a probe the container only has to run."""
        asked = container.get(probe, {})
        if "exec" in asked:
            words = asked["exec"]["command"]
        elif "httpGet" in asked:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            port, path = ports[asked["httpGet"]["port"]], asked["httpGet"]["path"]
            words = ["python3", "-c", ASK.format(port=port, path=path)]
        else:
            words = ["true"]
        try:
            docker("exec", self.id_of(container["name"]), *words)
        except subprocess.CalledProcessError:
            return False
        return True

    def wait_ready(self) -> None:
        """Wait until every container passes its probes."""
        for container in self.containers:
            for probe in ("readinessProbe", "livenessProbe"):
                wait_until(
                    lambda container=container, probe=probe: self.passes(container, probe),  # type: ignore[misc]
                    f"{probe} of {self.name}, {container['name']}",
                )

    def kill(self, container: str) -> None:
        """Kill a container, and start it again as a kubelet does."""
        docker("kill", self.id_of(container))
        docker("start", self.id_of(container))

    def remove(self) -> None:
        """Stop and remove what was started: a host tier that is stopped leaves no arena."""
        names = [self.id_of(container["name"]) for container in self.containers]
        for words in (("stop", "-t", "5", *names), ("rm", "--force", *names, self.sandbox)):
            subprocess.run(["docker", *words], capture_output=True, check=False)


def _write(place: Path, path: str, files: dict[str, str]) -> None:
    """Write the files of a mount as a kubelet does with mode 0440 and a group for the pod."""
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    for name, text in files.items():
        if name == path or Path(name).parent == Path(path):
            file = place / Path(name).name
            file.write_text(text)
            os.chown(file, 0, GROUP)
            file.chmod(0o440)
