"""vLLM's own connector workers, asked for one request at a time.

Reads JSON lines on stdin, answers JSON lines on the descriptor that argv[2] names. argv[1] is the folder of the bench of vLLM's
workers (`bench.py`, `run.py` and what they import); nothing of it is copied here."""
import ctypes
import json
import os
import signal
import sys

engine, out = sys.argv[1], int(sys.argv[2])
sys.path.insert(0, engine)
log = os.environ.get("KVFERRY_COMPARE_LOG", "/dev/null")


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank that is stopped would stay for ever


def say(value):
    os.write(out, (json.dumps(value) + "\n").encode())


def ranks_of(pair):
    return [p.pid for p in pair.all]


def timed(result):
    """What a request took on its slowest decode rank, and what both sides spent."""
    d = max(result["decode"], key=lambda r: r["total_ms"])
    cpu = {s: sum(v for k, v in result["cpu_ms"].items() if k.startswith(s)) for s in ("decode", "prefill")}
    return {"total_ms": d["total_ms"], "handshake_ms": d["handshake_ms"], "descriptors": d["descriptors"],
            "bytes": d["bytes"], "cpu_decode_ms": cpu["decode"], "cpu_prefill_ms": cpu["prefill"],
            "failed": len(result["failed"])}


def main():
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    import bench
    import engine as _  # imports vLLM once, before the ranks are forked
    from run import Pair, ask_all
    pair, asked = None, {}
    say({"ready": True})
    for line in sys.stdin:
        c = json.loads(line)
        try:
            if c["do"] == "start":
                if pair:
                    pair.close()
                scenario = bench.CASES[c["case"]]
                pair = Pair(scenario, {}, log)
                tokens = scenario["tokens"][0]
                asked = {}
                # Contiguous ids first, from a pool that is still in order.
                for contiguous in (True, False):
                    if contiguous in c["contiguous"]:
                        asked[contiguous] = pair.plan(tokens, contiguous=contiguous, tag="compare-")
                say({"pids": ranks_of(pair)})
            elif c["do"] == "read":
                say(timed(pair.transfer([asked[c["contiguous"]]], verify=False)))
            elif c["do"] == "verify":
                ask_all(pair.D, cmd="reset")
                r = pair.transfer([asked[c["contiguous"]]], verify=True)
                say({"wrong": sum(v["bad_bytes"] for v in r["verify"]) if r["released_ok"] else -1})
            elif c["do"] == "stop":
                if pair:
                    pair.close()
                pair = None
                say({})
        except Exception as e:  # the driver decides what a failure means
            say({"error": f"{type(e).__name__}: {e}"})
    if pair:
        pair.close()


main()
