"""A launch script of `examples/vllm`, started as a user starts it, and asked with curl."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbm_common.runtime.processes import dying_with_parent, free_port

from tests.vllm.harness import BLOCK_TOKENS, ENVIRON, PATIENCE_MS, ROOT, VLLM_PYTHON, wait_for
from tests.waiting import lives

README = ROOT / "examples" / "vllm" / "README.md"
README_MODEL = "Qwen/Qwen3-0.6B"
START_DEADLINE_S = 600.0
"""Five engines at once, on two cores that others use, too."""
COUNTED_DEADLINE_S = 90.0
"""Engines that compute leave the services little of two cores."""
STOP_DEADLINE_S = 40.0
CPU_ARGUMENTS = (
    "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS),
    "--num-gpu-blocks-override", "64", "--max-model-len", "1920",
    "--max-num-batched-tokens", "256", "--enable-prompt-tokens-details",
)  # fmt: skip
"""For a machine without a GPU and with two cores; the last one shows what came from a cache."""
CPU_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # For `/reset_prefix_cache`.
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "UCX_TLS": "tcp,self,sm",
    "NIXL": json.dumps(
        {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"num_threads": 0},
        }
    ),
}
"""What docs/vllm.md says of machines with few cores, and of vLLM on CPU."""

VLLM_COMMAND = f"""#!{VLLM_PYTHON}
from importlib import metadata

version_of = metadata.version


def version(name):
    return version_of("vllm-cpu") + "+cpu" if name == "vllm" else version_of(name)


metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
"""
"""vLLM's command asks for the version of the distribution `vllm`: CPU builds have another name."""


def lines_of_readme() -> list[str]:
    """Return the lines to type, in the order in which the README has them."""
    return re.findall(r"^ {4}(\S.*)$", README.read_text(), re.MULTILINE)


def line_of(script: str) -> tuple[dict[str, str], list[str]]:
    """Return variables and words of the README's line for a script."""
    [line] = [line for line in lines_of_readme() if script in line]
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    return variables, [word for word in words if "=" not in word]


class Launched:
    """All processes of one script, with a host name, ports and directories of their own."""

    def __init__(
        self, script: str, model: str, directory: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start the README's line for a script, with another model."""
        variables, words = line_of(script)
        self.model, self.logs = model, directory / "logs"
        self.port = ports_in_a_row(5)
        self._mark = str(directory / "run")
        own = {
            "PATH": f"{commands(directory)}:{os.environ['PATH']}",
            "PORT": str(self.port), "NIXL_PORT": str(ports_in_a_row(4)), "LOGS": str(self.logs),
            "DYN_KVBM_CPU_CACHE_GB": "0.1", "DYN_KVBM_METRICS_PORT": str(free_port()),
            "KVBM_NATS_URL": f"nats://127.0.0.1:{free_port()}", "KVBM_HOST": f"ex{os.getpid()}",
            "KVBM_RUNTIME_DIR": self._mark, "KVBM_STATE_DIR": str(directory / "state"),
            "KVBM_ONBOARD_DEADLINE_MS": str(PATIENCE_MS),
            "KVBM_OFFER_DEADLINE_MS": str(PATIENCE_MS),
        }  # fmt: skip
        self._output = (directory / "output").open("w+b")
        self._process = subprocess.Popen(
            [*(model if word == README_MODEL else word for word in words), *CPU_ARGUMENTS],
            env=os.environ | ENVIRON | CPU_ENVIRON | own | variables | dict(environ or {}),
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output,
            process_group=0, preexec_fn=dying_with_parent(),
        )  # fmt: skip

    def wait_serving(self) -> Launched:
        """Wait until the script says that it serves."""

        def serves() -> bool:
            assert self._process.poll() is None, self.tail()
            return f"serving on http://127.0.0.1:{self.port}" in self.output()

        wait_for(serves, "it does not serve", deadline_s=START_DEADLINE_S, details=self.tail)
        return self

    def wait_attached(self, *names: str) -> None:
        """Wait until the engines' logs say that they have met the host tier, and not lost it."""

        def attached() -> bool:
            logs = [self.log(name) for name in names]
            return all(
                log.count(f"{link}: attached") > log.count(f"{link}: lost")
                for log in logs
                for link in (": host tier", ": worker 0")
            )

        wait_for(attached, f"{names} do not attach", deadline_s=60, details=self.tail)

    def curl(self, prompt: Sequence[int], **more: object) -> dict[str, Any]:
        """Send the README's request, with a prompt of tokens, and return the reply."""
        return dict(json.loads(self.curl_text(prompt, **more)))

    def curl_text(self, prompt: Sequence[int], **more: object) -> str:
        """Send the README's request, with a prompt of tokens, and return what curl prints."""
        [line] = [line for line in lines_of_readme() if line.startswith("curl")]
        words = shlex.split(line.replace(":8000/", f":{self.port}/"))
        at = words.index("-d") + 1
        body = json.loads(words[at]) | {"prompt": list(prompt), "model": self.model}
        words[at] = json.dumps(body | {"return_token_ids": True} | more)
        return self._run("curl", "--silent", "--show-error", "--max-time", "100", *words[1:])

    def reset(self, *workers: int) -> None:
        """Empty the prefix caches of the devices; they refuse as long as blocks are held."""
        for worker in workers:
            url = f"http://127.0.0.1:{self.port + worker}/reset_prefix_cache"
            reply = self._run("curl", "--silent", "--fail", "--max-time", "60", "-X", "POST", url)
            assert "error" not in reply, reply

    def counted(self, what: str, *, worker: int = 0) -> float:
        """Return a counter of the connector, from the metrics of vLLM."""
        text = self._run("curl", "--silent", f"http://127.0.0.1:{self.port + worker}/metrics")
        lines = (line.rpartition(" ") for line in text.splitlines() if f'what="{what}"' in line)
        return sum(
            float(value)
            for name, _, value in lines
            if name.startswith("vllm:kvbm_connector_total{")
        )

    def wait_counted(self, what: str, count: float, *, worker: int = 0) -> None:
        """Wait until the connector has counted that much."""
        wait_for(
            lambda: self.counted(what, worker=worker) >= count,
            f"not {count} {what}",
            deadline_s=COUNTED_DEADLINE_S,
            details=lambda: f"{self.counted(what, worker=worker)}{self.tail()}",
        )

    def _run(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.returncode} {done.stderr}{self.tail()}"
        return done.stdout

    def processes(self) -> list[int]:
        """Return the processes that the script has started and that live, by what they inherit."""
        mark = f"KVBM_RUNTIME_DIR={self._mark}\0".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                if mark in environ_of(pid) and lives(pid)]  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a process by the name that the script has printed."""
        os.kill(int(re.findall(rf"^{name}: pid (\d+)", self.output(), re.MULTILINE)[0]), 9)

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Send the script a signal; return its exit status when it has ended."""
        self._process.send_signal(signal_number)
        return self.wait_ended()

    def wait_ended(self) -> int:
        """Return the script's exit status when it has ended."""
        return self._process.wait(STOP_DEADLINE_S)

    def close(self) -> None:
        """End what is left; a test that has failed may leave something."""
        if self._process.poll() is None:
            self.end()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self._output.close()

    def output(self) -> str:
        """Return what the script has printed."""
        return Path(self._output.name).read_text()

    def log(self, name: str) -> str:
        """Return the log of one of its processes."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def tail(self) -> str:
        """Return the ends of everything that was printed."""
        logs = sorted(self.logs.glob("*.log"))
        ends = [f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
        return "\n".join([self.output(), *ends])


def commands(directory: Path) -> Path:
    """Return a folder with the commands `vllm`, `kvbm` and `python3`, as an environment that holds
    both packages has them."""
    folder = directory / "bin"
    folder.mkdir()
    for name, text in (
        ("vllm", VLLM_COMMAND),
        ("python3", f'#!/bin/sh\nexec {VLLM_PYTHON} "$@"\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "kvbm").symlink_to(ROOT / ".venv" / "bin" / "kvbm")
    return folder


def environ_of(pid: int) -> bytes:
    """Return the variables that a process began with; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ProcessLookupError):
        return b""


def ports_in_a_row(count: int) -> int:
    """Return the first of so many consecutive ports; those that are drawn later lie far above."""
    return free_port(also_above=count - 1)


def tokens_of(reply: Mapping[str, Any]) -> list[int]:
    """Return the tokens of an answer."""
    return list(reply["choices"][0]["token_ids"])


def cached_of(reply: Mapping[str, Any]) -> int:
    """Return how many tokens of the prompt came from a cache."""
    return int((reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
