"""A real vLLM engine in a child process, driven line by line, and a client that fails on command.

One engine serves many cases: starting one takes 15 to 25 seconds. The child answers on a pipe of its own, since vLLM
talks on stdout. With `multiprocess=True` the engine core is a process of its own, as in production; faults can only be
ordered where everything is in one process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.connectors.vllm.patience import be_patient
from tests.support.daemon import ROOT, die_with_parent, read_line

START = 300.0  # seconds an engine may take to start on a busy machine
ANSWER = 120.0
PROMPT = [(7 * i + 3) % 1000 + 5 for i in range(600)] + [9]
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "2",
}


def prompt(seed: int, length: int = 601) -> list[int]:
    """A prompt that shares no block with those of other seeds."""
    return [(7 * i + 13 * seed + 3 + (i * i * seed) % 17) % 1000 + 5 for i in range(length)]


class Engine:
    """A context manager. `extra` goes to vllm.LLM, `settings` to the connector; `socket` None: no connector. `program`:
    the module of the child."""

    program = "tests.connectors.vllm.engine"

    def __init__(
        self,
        model: Path,
        socket: Path | str | None,
        *,
        settings: dict[str, Any] | None = None,
        multiprocess: bool = False,
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **extra: Any,
    ) -> None:
        config: dict[str, Any] | None = None
        if socket is not None:
            config = {
                "kv_connector": "KvtierConnector",
                "kv_connector_module_path": "kvtier.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": str(socket), **(settings or {})},
                **(transfer or {}),
            }
        self.arguments = {
            "model": str(model),
            "transfer": config,
            "extra": extra,
            "faults": not multiprocess and config is not None and config["kv_connector"] == "KvtierConnector",
        }
        own = {key: value for key, value in os.environ.items() if key not in ("PYTHONHASHSEED", "VLLM_KV_CACHE_LAYOUT")}
        self.environment = {
            **own,
            **_QUIET,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
            **(environment or {}),
        }
        self.log = ""

    def __enter__(self) -> Engine:
        answers, theirs = os.pipe()
        self._answers = answers
        handle, self._path = tempfile.mkstemp(prefix="kvtier-engine-")
        self._log = os.fdopen(handle, "wb")
        command = [sys.executable, "-m", self.program, str(theirs), json.dumps(self.arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs],
            cwd=ROOT,
            env=self.environment,
            preexec_fn=die_with_parent,
        )
        os.close(theirs)
        try:
            self._hear(START)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.ask("end")
                assert self.process.wait(60) == 0
        finally:
            self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self._answers)
        self._log.close()
        os.unlink(self._path)

    def _hear(self, within: float) -> Any:
        try:
            answer = json.loads(read_line(self._answers, within))
        except AssertionError as error:
            raise AssertionError(f"{error}; the engine said:\n{self.said()[-6000:]}") from None
        assert "failure" not in answer, f"{answer['failure']}\nthe engine said:\n{self.said()[-6000:]}"
        return answer["value"]

    def said(self) -> str:
        """The engine's log so far."""
        return Path(self._path).read_text(errors="replace")

    def ask(self, command: str, **arguments: Any) -> Any:
        """One command (a function `do_...` below); its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._hear(ANSWER)

    def run(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        """One request to its end: {"tokens", "cached" (local and external), "external" (hit tokens of vLLM's own
        counter), "served" (ours)}."""
        return self.ask("run", prompts=[tokens], **options)[0]

    def run_all(self, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
        """Several requests at once. The counters are those of all of them together."""
        return self.ask("run", prompts=prompts, **options)


# The child


class Child:
    """What answers `Engine.ask`: a command is the name of a `do_...` method."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        be_patient()  # an engine core of its own is forked, and as patient
        self.watched: list[float] = []
        if arguments["faults"]:
            from kvtier.connectors.vllm import KvtierConnector

            KvtierConnector.connect = Faulty
        transfer = KVTransferConfig(**arguments["transfer"]) if arguments["transfer"] else None
        options = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 1024,
            "seed": 0,
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
            **arguments["extra"],
        }
        self.llm = LLM(model=arguments["model"], **options)

    def metrics(self) -> dict[str, float]:
        """{name or name{label}: value}."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            labels = {key: value for key, value in metric.labels.items() if key not in ("model_name", "engine")}
            key = metric.name.removeprefix("vllm:") + (f"{{{next(iter(labels.values()))}}}" if len(labels) == 1 else "")
            if hasattr(metric, "value"):
                found[key] = found.get(key, 0) + metric.value
        return found

    def do_run(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        salt: str | None = None,
        lora: list[Any] | None = None,
        skip: bool = False,
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest

        before = self.metrics()
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=skip or None,
        )
        made = [
            TokensPrompt(prompt_token_ids=tokens, **({"cache_salt": salt} if salt is not None else {}))
            for tokens in prompts
        ]
        started = time.perf_counter()
        outputs = self.llm.generate(made, params, use_tqdm=False, lora_request=LoRARequest(*lora) if lora else None)
        seconds = time.perf_counter() - started
        after = self.metrics()
        delta = {name: after.get(name, 0) - before.get(name, 0) for name in after}
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "external": delta.get("external_prefix_cache_hits", 0),
                "served": delta.get("kvtier_hit_tokens", 0),
                "seconds": seconds,
                "reason": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]

    def do_metrics(self) -> dict[str, float]:
        return self.metrics()

    def do_forget(self, connector: bool = False) -> bool:
        """Drops the engine's own prefix cache, so that the next hit can only be external."""
        return bool(self.llm.llm_engine.reset_prefix_cache(reset_connector=connector))

    def do_limits(self, **seconds: float) -> None:
        """From now on these limits of the connector are as given, and the others patient; see `patience`."""
        be_patient(**seconds)

    def do_fault(self, **fault: Any) -> None:
        Faulty.order, Faulty.done = fault, 0

    def do_faults(self) -> int:
        return Faulty.done

    def do_settle(self, seconds: float = 20.0) -> bool:
        """Waits until the saver has nothing to do."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        mover = get_kv_transfer_group().worker.mover
        end = time.monotonic() + seconds
        while mover._saves:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def do_abort_midway(self, tokens: list[int], steps: int) -> int:
        """Adds a request, runs so many steps of the engine, aborts it: how many requests are unfinished then."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine = self.llm.llm_engine
        request = f"aborted-{time.monotonic_ns()}"
        engine.add_request(
            request,
            TokensPrompt(prompt_token_ids=tokens),
            SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False),
        )
        for _ in range(steps):
            engine.step()
        engine.abort_request([request], internal=False)
        for _ in range(3):
            engine.step()
        return int(engine.get_num_unfinished_requests())

    def do_watch(self) -> None:
        """From now on the first question about each request is timed: the later ones only look whether there is an
        answer."""
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        ask, self.watched = connector.get_num_new_matched_tokens, []
        seen: set[str] = set()

        def timed(request: Any, computed: int) -> Any:
            began = time.perf_counter()
            answer = ask(request, computed)
            if request.request_id not in seen:
                seen.add(request.request_id)
                self.watched.append(time.perf_counter() - began)
            return answer

        connector.get_num_new_matched_tokens = timed

    def do_watched(self) -> list[float]:
        """Seconds of each question since the last call."""
        seen = list(self.watched)
        self.watched.clear()
        return seen

    def do_state(self) -> dict[str, Any]:
        """Threads of ours, and what the halves hold."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        mover = get_kv_transfer_group().worker.mover
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier")]
        lines = Path("/proc/self/status").read_text().splitlines()
        rss = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
        return {"threads": len(names), "jobs": len(mover._jobs), "queued": len(mover._saves), "rss": rss * 1024}


class Faulty:
    """A client whose loads and saves fail once as ordered: {"on": "load" | "save", "at": block index, "kind": ...}.

    kind   "cut" (the answer ends there, as a miss), "raise", "sleep" (seconds), "kill" (the daemon of this pid), "away"
           (nobody answers)
    """

    order: dict[str, Any] | None = None
    done = 0

    def __init__(self, address: str) -> None:
        from kvtier.client.api import Client

        self._client = Client(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def lease(self, *arguments: Any, **options: Any) -> Any:
        return self._wrap("load", self._client.lease(*arguments, **options))

    def fill(self, *arguments: Any, **options: Any) -> Any:
        return self._wrap("save", self._client.fill(*arguments, **options))

    def _wrap(self, on: str, made: Any) -> Any:
        order = Faulty.order
        if order is None or order["on"] != on or threading.current_thread().name != f"kvtier-{on}":
            return made
        if not order.get("always"):
            Faulty.order = None
        Faulty.done += 1
        return _Faulted(made, order)


class _Faulted:
    """A lease or a fill with one fault in it."""

    def __init__(self, inner: Any, order: dict[str, Any]) -> None:
        self._inner, self._order = inner, order
        self._cut = False

    def __enter__(self) -> Any:
        if self._order.get("at") == -1:
            self._strike()
        self._inner.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._inner.__exit__(*failure)

    def __len__(self) -> int:
        return self._order["at"] if self._cut or self._order["kind"] == "cut" else len(self._inner)

    def __iter__(self) -> Any:
        for index, view in enumerate(self._inner):
            if index == self._order["at"]:
                if self._order["kind"] == "cut":
                    self._cut = True
                    return
                self._strike()
            yield view

    def __getattr__(self, name: str) -> Any:
        if self._order["kind"] == "cut" and name in ("ending", "stop", "error", "reason"):
            from kvtier.protocol.stops import MISS, Ending

            ending = Ending(**self._order["ending"]) if "ending" in self._order else MISS
            return ending if name == "ending" else getattr(ending, name)
        return getattr(self._inner, name)

    def _strike(self) -> None:
        kind = self._order["kind"]
        if kind == "raise":
            raise RuntimeError("ordered by the test")
        if kind == "sleep":
            time.sleep(self._order["seconds"])
        if kind == "kill":
            os.kill(self._order["pid"], signal.SIGKILL)
            time.sleep(0.2)


def main(kind: type[Child] = Child) -> None:
    """The child's loop."""
    answers = os.fdopen(int(sys.argv[1]), "w")

    def say(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        child = kind(json.loads(sys.argv[2]))
    except BaseException as error:
        say({"failure": f"{type(error).__name__}: {error}"})
        raise
    say({"value": "ready"})
    for line in sys.stdin:
        command, arguments = json.loads(line)
        if command == "end":
            break
        try:
            say({"value": getattr(child, f"do_{command}")(**arguments)})
        except Exception as error:
            say({"failure": f"{type(error).__name__}: {error}"})
    child.llm.llm_engine.engine_core.shutdown()
    say({"value": "ended"})


if __name__ == "__main__":
    main()
