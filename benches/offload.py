#!/usr/bin/env python3
"""Experts on the host, and less and less of the card: what `evergraph bench` does while this process holds the rest.

    benches/offload.py MODEL [--evergraph PATH] [--free 12,8.5,8.0] [--from 8.0 --down-to 6.0 --step-mib 64] [--limits 8.0,7.7,7.4]

Needs an NVIDIA driver and nothing else. For each size and each pool it runs

    evergraph bench -m MODEL -ngl 99 -ncmoe 20 -fa 0 -p 512 -n 128 -d 16384 -r 1 -t 16

and prints a row of a markdown table: how it ended, prompt and decode speed, what was given back and how graphs were repaired. Any end
but rows of figures or a typed error of memory is a failure of the sweep, and its exit status is 1. `--tokens-at` are sizes where the
tokens of a text with graphs are compared with those of the same text without.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time

GIB = 1 << 30


class Holder:
    """Holds so much of the card that a given size is free."""

    PIECE = 16 << 20

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.held = []

    def call(self, name, *args):
        status = getattr(self.cuda, name)(*args)
        if status:
            raise RuntimeError(f"{name}: {status}")

    def free(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def leave(self, wanted):
        """Takes or gives back memory until `wanted` bytes are free, to within a few MiB."""
        while self.free() < wanted and self.held:
            self.call("cuMemFree_v2", ctypes.c_uint64(self.held.pop()))
        while (spare := self.free() - wanted) > 2 << 20:
            size = max(min(spare // 2, 8 * GIB), min(spare, self.PIECE)) // (2 << 20) * (2 << 20)
            ptr = ctypes.c_uint64()
            if self.cuda.cuMemAlloc_v2(ctypes.byref(ptr), ctypes.c_size_t(size)):
                break
            self.held.append(ptr.value)
        return self.free()

    def release(self):
        while self.held:
            self.call("cuMemFree_v2", ctypes.c_uint64(self.held.pop()))


def bench(args, pool, extra):
    words = [args.evergraph, "bench", "-m", args.model, "-ngl", "99", "-ncmoe", "20", "-fa", args.fa, "-p", "512", "-n", "128"]
    words += ["-d", str(args.depth), "-r", "1", "-t", "16", "--pool", pool, "-o", "json", *extra]
    start = time.time()
    done = subprocess.run(words, capture_output=True, text=True, timeout=args.timeout)
    seconds = time.time() - start
    try:
        rows = json.loads(done.stdout)
    except json.JSONDecodeError:
        rows = []
    return done, rows, seconds


def tokens(args, pool, graphs):
    ids = ",".join(str(2 + 37 * i % 50000) for i in range(1500))
    words = [args.evergraph, "run", "-m", args.model, "-ncmoe", "20", "-fa", args.fa, "-t", "16", "--pool", pool, "--graphs", graphs]
    words += ["--tokens", ids, "-n", "48", "--temp", "0", "--ignore-eos", "-c", "4096", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=args.timeout)
    return json.loads(done.stdout)["tokens"] if done.returncode == 0 else done.stderr[-400:]


def sizes(text):
    return [float(word) for word in text.split(",") if word]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--evergraph", default="evergraph")
    parser.add_argument("--free", type=sizes, default=sizes("24,12,9,8.5"))
    parser.add_argument("--from", dest="start", type=float, default=8.0)
    parser.add_argument("--down-to", type=float, default=5.0)
    parser.add_argument("--step-mib", type=int, default=64)
    parser.add_argument("--limits", type=sizes, default=sizes("8.0,7.7,7.0"))
    parser.add_argument("--tokens-at", type=sizes, default=sizes("8.0,7.0"))
    parser.add_argument("--pools", default="vmm,slab")
    parser.add_argument("--fa", default="0")
    parser.add_argument("--depth", type=int, default=16384)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further size is begun")
    args = parser.parse_args()
    holder, begun, bad = Holder(), time.time(), 0

    print("| pool | memory, GiB | end | pp512 | tg128 | give-backs | stale | remaps | updates | recaptures | eager | peak, GiB | s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")

    def row(pool, what, extra):
        """Runs one size; whether it completed."""
        nonlocal bad
        try:
            done, rows, seconds = bench(args, pool, extra)
        except subprocess.TimeoutExpired:
            print(f"| {pool} | {what} | no end within {args.timeout:.0f} s |")
            bad += 1
            return True
        errors = [row["error"] for row in rows if row.get("error")]
        whole = done.returncode == 0 and len(rows) == 2 and not errors
        memory = done.returncode == 1 and "out of memory" in (done.stderr + "".join(errors)).lower()
        if whole:
            end = "completes"
        elif memory:
            end = "out of memory, typed" + ("" if not rows or len(errors) == len(rows) else f" ({len(errors)} of {len(rows)} tests)")
        else:
            bad += 1
            last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
            end = f"**status {done.returncode}**: {last[:90]}"
        speed = {("pp" if row["n_prompt"] else "tg"): row["avg_ts"] for row in rows if not row.get("error")}
        count = lambda name: sum(row.get(name) or 0 for row in rows)
        peak = max([row.get("peak_reserved_bytes") or 0 for row in rows], default=0) / GIB
        figure = lambda name: f"{speed[name]:.0f}" if name in speed else "–"
        counts = " | ".join(str(count(name)) for name in ["give_backs", "stale", "remaps", "updates", "recaptures", "eager"])
        print(f"| {pool} | {what} | {end} | {figure('pp')} | {figure('tg')} | {counts} | {peak:.2f} | {seconds:.0f} |", flush=True)
        return bool(speed)

    for pool in args.pools.split(","):
        for free in args.free:
            if time.time() - begun < args.budget:
                row(pool, f"{holder.leave(int(free * GIB)) / GIB:.2f} free", [])
        free, failed = args.start, 0
        while free >= args.down_to and failed < 2 and time.time() - begun < args.budget:
            failed = 0 if row(pool, f"{holder.leave(int(free * GIB)) / GIB:.2f} free", []) else failed + 1
            free -= args.step_mib / 1024
        holder.release()
        for limit in args.limits:
            if time.time() - begun < args.budget:
                row(pool, f"{limit} limit", ["--mem-limit", f"{limit}GiB"])
        for free in args.tokens_at:
            if time.time() - begun < args.budget:
                holder.leave(int(free * GIB))
                on, off = tokens(args, pool, "on"), tokens(args, pool, "off")
                same = isinstance(on, list) and on == off
                bad += not same
                print(f"\n{pool}, {free} GiB free: {'the same tokens with graphs and without' if same else f'**{on} / {off}**'}\n", flush=True)
        holder.release()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
