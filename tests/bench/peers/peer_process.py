"""Runs inside a peer's own virtual environment: reads one JSON command a line, answers one JSON line.

Why it exists: LMCache and vLLM pin other versions of what kvtier uses, and an interleaved measurement needs
both sides alive at once. It must not import anything of kvtier. Times are nanoseconds of `perf_counter_ns`;
CPU seconds are this process's own.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def _cpu() -> float:
    return time.process_time()


class LmcacheL1:
    """L1Manager of LMCache's multi-process mode, called in process, at its defaults."""

    def __init__(self, block: int, blocks: int) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        torch.set_num_threads(1)
        self._torch = torch
        size = block * (blocks + 2)
        memory = L1MemoryManagerConfig(
            size_in_bytes=size, use_lazy=False, init_size_in_bytes=size, shm_name=""
        )
        self._manager = L1Manager(L1ManagerConfig(memory_config=memory))
        self._layout = MemoryLayoutDesc([torch.Size([block])], [torch.uint8])
        self._keys = [
            ObjectKey(chunk_hash=i.to_bytes(32, "big"), model_name="m", kv_rank=0) for i in range(blocks)
        ]
        self._payload = torch.full((block,), 7, dtype=torch.uint8)

    def put(self, batch: int, rounds: int) -> dict[str, list[int]]:
        """Per call: metadata (reserve_write + finish_write) and the copy apart, of `batch` keys."""
        metadata, copy = [], []
        for index in range(rounds):
            keys = self._keys[index * batch : (index + 1) * batch]
            t0 = time.perf_counter_ns()
            got = self._manager.reserve_write(keys, [False] * batch, self._layout)
            t1 = time.perf_counter_ns()
            for key in keys:
                got[key][1].tensor.copy_(self._payload)
            t2 = time.perf_counter_ns()
            self._manager.finish_write(keys)
            t3 = time.perf_counter_ns()
            metadata.append((t1 - t0) + (t3 - t2))
            copy.append(t2 - t1)
        return {"metadata": metadata, "copy": copy}

    def get(self, batch: int, rounds: int, stored: int) -> dict[str, list[int]]:
        times = []
        spans = max(1, stored // batch)
        for index in range(rounds):
            at = index % spans * batch
            keys = self._keys[at : at + batch]
            t0 = time.perf_counter_ns()
            self._manager.reserve_read(keys)
            self._manager.finish_read(keys)
            times.append(time.perf_counter_ns() - t0)
        return {"metadata": times}

    def delete(self, stored: int) -> None:
        self._manager.delete(self._keys[:stored])


class LmcacheFs:
    """LMCache's `fs` L2 adapter, O_DIRECT as asked; one store or load task for a whole batch."""

    def __init__(self, folder: str, block: int, blocks: int, direct: bool) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

        torch.set_num_threads(1)
        size = block * (blocks + 2)
        memory = L1MemoryManagerConfig(
            size_in_bytes=size, use_lazy=False, init_size_in_bytes=size, shm_name=""
        )
        self._manager = L1Manager(L1ManagerConfig(memory_config=memory))
        self._layout = MemoryLayoutDesc([torch.Size([block])], [torch.uint8])
        self._keys = [
            ObjectKey(chunk_hash=i.to_bytes(32, "big"), model_name="m", kv_rank=0) for i in range(blocks)
        ]
        got = self._manager.reserve_write(self._keys, [False] * blocks, self._layout)
        self._objects = [got[key][1] for key in self._keys]
        for index, item in enumerate(self._objects):
            item.tensor.fill_(index % 251)
        self._adapter = FSL2Adapter(
            FSL2AdapterConfig.from_dict({"type": "fs", "base_path": folder, "use_odirect": direct})
        )

    def _wait(self, pop: Any, deadline: float) -> Any:
        while True:
            found = pop()
            if found:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError("the peer did not complete its task")
            time.sleep(0)

    def store(self) -> dict[str, float]:
        cpu, t0 = _cpu(), time.perf_counter()
        task = self._adapter.submit_store_task(self._keys, self._objects)
        done = self._wait(self._adapter.pop_completed_store_tasks, time.monotonic() + 120)
        wall = time.perf_counter() - t0
        assert task in done
        return {"seconds": wall, "cpu": _cpu() - cpu}

    def load(self) -> dict[str, float]:
        cpu, t0 = _cpu(), time.perf_counter()
        task = self._adapter.submit_load_task(self._keys, self._objects)
        self._wait(lambda: self._adapter.query_load_result(task), time.monotonic() + 120)
        return {"seconds": time.perf_counter() - t0, "cpu": _cpu() - cpu}

    def clear(self) -> None:
        self._adapter.delete(self._keys)


class VllmFs:
    """`batch_store_block`, `batch_load_block` of vLLM's fs tier over `threads` workers, one file a block."""

    def __init__(self, folder: str, block: int, blocks: int, direct: bool, threads: int) -> None:
        from vllm.v1.kv_offload.tiering.fs import io

        self._io, self._block, self._direct, self._threads = io, block, direct, threads
        self._map = mmap.mmap(-1, block * blocks)
        self._view = memoryview(self._map)
        for index in range(blocks):
            self._view[index * block : (index + 1) * block] = bytes([index % 251]) * block
        self._paths = [
            str(Path(folder) / f"{index // 256:03x}" / f"{index:08x}.bin") for index in range(blocks)
        ]
        for folder_name in {os.path.dirname(path) for path in self._paths}:
            os.makedirs(folder_name, exist_ok=True)
        self._offsets = [index * block for index in range(blocks)]
        self._pool = ThreadPoolExecutor(threads)
        self.native = bool(io._HAS_FSIO_C)

    def _run(self, function: Any) -> dict[str, float]:
        share = -(-len(self._paths) // self._threads)
        cpu, t0 = _cpu(), time.perf_counter()
        tasks = [
            self._pool.submit(
                function,
                self._paths[at : at + share],
                self._view,
                self._offsets[at : at + share],
                self._block,
                self._direct,
            )
            for at in range(0, len(self._paths), share)
        ]
        for task in tasks:
            task.result(timeout=120)
        return {"seconds": time.perf_counter() - t0, "cpu": _cpu() - cpu}

    def store(self) -> dict[str, float]:
        return self._run(self._io.batch_store_block)

    def load(self) -> dict[str, float]:
        return self._run(self._io.batch_load_block)

    def clear(self) -> None:
        for path in self._paths:
            os.unlink(path)


def main() -> None:
    makers = {"lmcache_l1": LmcacheL1, "lmcache_fs": LmcacheFs, "vllm_fs": VllmFs}
    live: dict[str, Any] = {}
    answers = os.fdopen(os.dup(1), "w")
    # Peers log to stdout; the answers need it for themselves.
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "make":
                live[command["name"]] = makers[command["kind"]](**command["with"])
                answer: Any = {"native": getattr(live[command["name"]], "native", None)}
            elif command["do"] == "drop":
                live.pop(command["name"])
                answer = {}
            else:
                answer = getattr(live[command["name"]], command["do"])(**command.get("with", {}))
            reply = {"ok": answer}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
