"""The options of sbatch, and what becomes of each. Source: sbatch(1), Slurm 24.05."""

# One letter -> the option.
SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint",
    "c": "cpus-per-task", "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile",
    "G": "gpus", "H": "hold", "h": "help", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet", "q": "qos",
    "S": "core-spec", "s": "oversubscribe", "t": "time", "v": "verbose", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip

# Read, each with a value.
READ = frozenset((
    "account", "array", "chdir", "container-image", "cpus-per-gpu", "cpus-per-task", "dependency",
    "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "mem", "mem-per-cpu",
    "mem-per-gpu", "nodes", "ntasks", "ntasks-per-node", "partition", "time",
))  # fmt: skip
READ_BARE = frozenset(("no-requeue", "requeue"))

_HOSTS = "hosts are made for the queue: choose a queue, or its compute in batchml.toml"
_LOGS = "all output is kept, and shown by batchml logs"
_MAIL = "no mail is sent: batchml wait ends with the run's exit code"
_PLACE = "how tasks lie on cores and sockets is left to Linux"

# Told of, and passed over: the run is right without.
PASSED = {
    "batch": _HOSTS, "comment": "tags say such things: --tag", "constraint": _HOSTS,
    "contiguous": _HOSTS, "core-spec": _PLACE, "cores-per-socket": _PLACE, "cpu-freq": _PLACE,
    "deadline": "runs have no deadline, --timeout limits their time", "delay-boot": _HOSTS,
    "distribution": _PLACE, "error": _LOGS, "exclude": _HOSTS,
    "exclusive": "ask for all vCPUs of a host, and nobody else is on it",
    "extra": "tags say such things: --tag", "extra-node-info": _PLACE,
    "get-user-env": "variables travel by --set-env alone", "gpu-bind": _PLACE, "gpu-freq": _PLACE,
    "gres-flags": _PLACE, "hint": _PLACE, "ignore-pbs": "lines of PBS are not read",
    "kill-on-invalid-dep": "a run whose dependency failed ends with it", "mail-type": _MAIL,
    "mail-user": _MAIL, "mem-bind": _PLACE, "mincpus": _PLACE,
    "network": "hosts of a queue are in one network",
    "nice": "queues have priorities, runs have none", "nodefile": _HOSTS, "nodelist": _HOSTS,
    "no-kill": "a run of several nodes ends with its main node",
    "ntasks-per-core": _PLACE, "ntasks-per-socket": _PLACE,
    "open-mode": _LOGS, "output": _LOGS, "overcommit": _PLACE,
    "oversubscribe": "hosts are shared as their vCPUs, memory and GPUs allow",
    "parsable": "batchml submit --json says the job's id to programs", "power": _HOSTS,
    "prefer": _HOSTS, "priority": "queues have priorities, runs have none",
    "profile": "the use of the machine is measured always: batchml show",
    "propagate": "limits are those of the container", "qos": "queues stand for it: --queue",
    "quiet": "", "reboot": _HOSTS,
    "reservation": "capacity_reservation of a compute environment in batchml.toml stands for it",
    "signal": "SIGTERM comes [checkpoint] grace seconds before the kill, and no other signal",
    "sockets-per-node": _PLACE, "spread-job": _HOSTS, "switches": _HOSTS,
    "thread-spec": _PLACE, "threads-per-core": _PLACE, "time-min": "--time is what counts",
    "tmp": "disk_gib of a compute environment in batchml.toml is what a host has",
    "tres-bind": _PLACE, "use-min-nodes": _HOSTS, "verbose": "",
    "wait-all-nodes": "nodes begin together", "wckey": "tags say such things: --tag",
    "cluster-constraint": _HOSTS, "mcs-label": "tags say such things: --tag",
}  # fmt: skip
PASSED_BARE = frozenset((
    "contiguous", "ignore-pbs", "overcommit", "oversubscribe", "parsable", "quiet", "reboot",
    "spread-job", "use-min-nodes", "verbose",
))  # fmt: skip
MAYBE_BARE = frozenset(("exclusive", "get-user-env", "nice", "no-kill", "propagate"))

# Refused: without it the run would be another one.
REFUSED = {
    "bb": "there are no burst buffers: data lies in the workspace",
    "bbf": "there are no burst buffers: data lies in the workspace",
    "begin": "a run begins as soon as there is room. Submit it then",
    "clusters": "an environment is named on the command line: --env",
    "container": "name the image: #BATCHML --image",
    "container-id": "name the image: #BATCHML --image",
    "container-mounts": "a run sees /workspace, and no folders of hosts",
    "container-workdir": "a run works in the folder that travels with it",
    "export-file": "name the variables: #BATCHML --set-env NAME=VALUE",
    "gpus-per-socket": "say --gpus-per-node",
    "help": "is for the command line",
    "hold": "runs cannot be held: submit it later, or --after another one",
    "input": "a run reads nothing from a terminal or a file: open it in the script",
    "licenses": "there are none; consumable resources of AWS Batch are not asked for by scripts",
    "ntasks-per-gpu": "say --ntasks-per-node",
    "test-only": "is for the command line: batchml submit --dry-run",
    "tres-per-task": "say --cpus-per-task and --gpus-per-task",
    "uid": "a run belongs to who submits it",
    "wait": "is for the command line: batchml submit --wait",
    "wrap": "is for the command line: batchml submit -- COMMAND",
}
REFUSED_BARE = frozenset(("help", "hold", "test-only", "wait"))

KNOWN = READ | READ_BARE | PASSED.keys() | REFUSED.keys()
BARE = READ_BARE | PASSED_BARE | REFUSED_BARE
