"""All measurements of the lab, one after the other, as `docs/results.md` names them.

It should take four hours and a quarter on two cores with nothing else to do, and never takes
more than twice that: a command that takes more than twice its time is ended, and so is the present
one by Ctrl-C; as by Ctrl-C itself, so that it takes down its lab. What each prints is kept in
`benchmarks/out/`, its last line as JSON; a goal that is missed is a result, not a failure. Needs
root.

    python benchmarks/wan/everything.py [NAME …] [--list]
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from _helpers import end_politely
from _namespaces import LabError, require_root

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / "benchmarks" / "out"
RESULTS = '{"bench"'
END_S = 60.0  # for a command that is told to end
TIMED_OUT = 124  # what `timeout` then returns
INTERRUPTED = 130


class Command(NamedTuple):
    minutes: float  # that it should take
    command: str  # of a file beside this one


# Less than this, and averaging on `home` is not hidden; more costs loss (docs/results.md).
AHEAD = "--policy delayed --ahead 0.625"
THIN = (
    "--keep-window --seconds 12 --microbatch-size 2"
    ' --settings "subspace-32 int4" "subspace-16 int4" "subspace-8 int4"'
)
POOR = (
    "--policy delayed --keep-window --microbatch-size 1 --profiles lan poor"
    ' --settings "subspace-8 int4"'
)
LONGER = "--microbatches 64 --seconds 20"
HALF = f"--ahead 0.5 {LONGER}"
# What `poor` has to be compared with too: on `lan` larger microbatches might do better.
LARGER = (
    f'--policy delayed --keep-window --profiles lan {HALF} --rounds 3 --settings "subspace-8 int4"'
)
WIDE = (
    "--keep-window --seconds 12 --limit 600 --torch"
    ' --settings "subspace-32 int4" bfloat16 int8 int4'
)
AVERAGED = (
    f"{AHEAD} --keep-window --seconds 12 --microbatch-size 2"
    ' --settings "subspace-8 int4" --profiles lan home --congestion cubic'
)
CONNECTIONS = "--connections 1 2 4 8 16"
COMMANDS = {
    "line": Command(8, "line.py --plot benchmarks/out/wan_line.png"),
    "averaging": Command(18, "averaging.py"),
    "pairs": Command(3, "averaging.py --members 2 --mb 1 --rounds 9 --keep-window"),
    "connections": Command(
        10,
        f"averaging.py --members 4 --profiles fibre home --mb 8 --rounds 3 {CONNECTIONS}"
        " --plot benchmarks/out/wan_connections.png",
    ),
    "connections_on_poor": Command(
        8, "averaging.py --members 4 --profiles poor --mb 2 --rounds 3 --connections 1 2 4 8"
    ),
    "unlike": Command(6, "averaging.py --profiles mixed --members 4 --mb 2 --split --keep-window"),
    # Once each of what comes again in rounds, or beside torch: the newest run counts.
    "subspace_codecs": Command(
        3,
        f"throughput.py {AHEAD} --keep-window --seconds 12 --microbatch-size 2 --profiles lan home"
        ' --settings "subspace-32 bfloat16" "subspace-32 int8" "subspace-32 int4"',
    ),
    "wide_floats": Command(
        14,
        "throughput.py --keep-window --seconds 12 --limit 600"
        ' --settings "subspace-32 int4" float32 float16 --profiles lan fibre home',
    ),
    "torch_on_poor": Command(
        14,
        "throughput.py --keep-window --seconds 12 --limit 600 --torch"
        ' --settings "subspace-8 int4" --profiles lan poor --congestion bbr',
    ),
    "exact": Command(12, f"throughput.py --policy exact {THIN}"),
    "ahead": Command(21, f"throughput.py {AHEAD} --profiles lan fibre home --rounds 5 {THIN}"),
    # What `update.ahead` is unless told; the kernel as it comes; a subspace in other codecs.
    "quarter_ahead": Command(
        8,
        "throughput.py --policy delayed --ahead 0.25 --keep-window --seconds 12 --rounds 3"
        ' --microbatch-size 2 --settings "subspace-32 int4" "subspace-8 int4"'
        " --profiles lan fibre home",
    ),
    "stock_kernel": Command(
        5,
        f"throughput.py {AHEAD} --seconds 12 --microbatch-size 2 --rounds 5"
        ' --settings "subspace-8 int4" --profiles lan home',
    ),
    "poor_all_ahead": Command(6, f"throughput.py {POOR} --congestion bbr --seconds 12 --rounds 5"),
    # Four steps and more: one takes 3.1 s on `lan`, 3.2 s on `poor`, more with cubic.
    "poor_half_ahead": Command(
        12, f"throughput.py {POOR} {HALF} --congestion bbr cubic --rounds 5"
    ),
    "poor_averaged": Command(
        12, f"throughput.py {POOR} {HALF} --congestion bbr cubic --rounds 5 --parameters 100000"
    ),
    # Where averaging is most of a step: several connections help nothing else.
    "poor_connections": Command(
        6,
        "throughput.py --policy exact --keep-window --microbatch-size 1 --profiles poor"
        ' --settings "subspace-8 int4" --congestion cubic --seconds 20 --rounds 4'
        " --parameters 1000000 --connections 1 4",
    ),
    "lan_of_2": Command(2.5, f"throughput.py {LARGER} --microbatch-size 2"),
    "lan_of_4": Command(2.5, f"throughput.py {LARGER} --microbatch-size 4"),
    "averaged": Command(4, f"throughput.py {AVERAGED} --parameters 100000 --rounds 5"),
    "averaged_more": Command(2, f"throughput.py {AVERAGED} --parameters 1000000"),
    "averaged_longer": Command(  # steps of 262,144 tokens
        2, f"throughput.py {AVERAGED} --parameters 1000000 {LONGER}"
    ),
    "wide": Command(21, f"throughput.py {WIDE} --profiles lan fibre home"),
    "wide_ahead": Command(
        9,
        f"throughput.py {AHEAD} --keep-window --seconds 12 --limit 600"
        ' --settings "subspace-32 int4" int4 --profiles lan fibre home --congestion cubic',
    ),
    "real": Command(
        11,
        'throughput.py --real --keep-window --seconds 60 --settings "subspace-32 int4"'
        " --profiles lan fibre home poor",
    ),
    # Long enough for steps after the first, which alone has nothing computed ahead.
    "real_wide": Command(
        14,
        "throughput.py --real --keep-window --seconds 60 --settings bfloat16 int8 int4"
        " --profiles lan home",
    ),
    "real_ahead": Command(
        10,
        f'throughput.py --real {AHEAD} --keep-window --seconds 60 --settings "subspace-32 int4"'
        " int8 --profiles lan home",
    ),
    "wire_bytes": Command(12, "wire_bytes.py --steps 4 --subspace 8 16 32"),
    "shares": Command(1, "throughput.py --show --plot benchmarks/out/wan_throughput.png"),
}


def run(name: str, command: Command) -> bool:
    """Run it, keep what it prints and show that at the end. Whether it ended well and in time."""
    file, *arguments = shlex.split(command.command)
    text, json = OUT / f"wan_{name}.txt", OUT / f"wan_{name}.json"
    json.unlink(missing_ok=True)
    limit_s = 120 * command.minutes
    print(f"== {name}: {command.command}   (goes to {text.name})", flush=True)
    with text.open("w") as out, (OUT / f"wan_{name}.err").open("w") as errors:
        # A second Ctrl-C would end the cleaning up. So `timeout` tells the command alone, once, and
        # not also the group that both would be (--foreground), and a terminal tells neither.
        process = subprocess.Popen(
            ["timeout", "--foreground", "--signal", "INT", "--kill-after", str(END_S), str(limit_s),
             sys.executable, str(HERE / file), *arguments],
            cwd=ROOT, stdout=out, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait()
        finally:  # also when this process is told to end
            process.send_signal(signal.SIGINT)
            process.wait()
    lines = text.read_text().splitlines(keepends=True)
    print("".join(line for line in lines if not line.startswith(RESULTS)), end="", flush=True)
    if process.returncode == 0 and lines and lines[-1].startswith(RESULTS):
        json.write_text(lines[-1])
        return True
    why = (OUT / f"wan_{name}.err").read_text().strip().rpartition("\n")[2]
    if process.returncode == TIMED_OUT:
        why = f"not done after {limit_s:.0f} s"
    print(f"   {name} failed: {why}", flush=True)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(COMMANDS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in COMMANDS]
    if unknown:
        parser.error(f"there is no {unknown[0]}; there are {', '.join(COMMANDS)}")
    chosen = {name: COMMANDS[name] for name in options.names}
    if options.list:
        for name, each in chosen.items():
            print(f"{name:18} {each.minutes:3.0f} min   python benchmarks/wan/{each.command}")
        return
    require_root()
    end_politely()
    OUT.mkdir(parents=True, exist_ok=True)
    minutes = sum(each.minutes for each in chosen.values())
    print(f"about {minutes:.0f} minutes, at most {2 * minutes:.0f}", flush=True)
    began = time.monotonic()
    failed = [name for name, each in chosen.items() if not run(name, each)]
    print(f"done after {(time.monotonic() - began) / 60:.0f} minutes", flush=True)
    if failed:
        raise SystemExit(f"error: not measured: {', '.join(failed)}")


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
