"""A driver's libraries that are not: libnvidia-ml.so.1 with two GPUs that do as they are told, and
libcuda.so.1, which starts unless FAKE_CUDA_INIT is an error.

Built by the machine's compiler, so that what is proved is the calls themselves: names, arguments,
layouts. It follows nvml.h.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from batchml.runtime.telemetry.gpus import Nvml
from tests.support.needs import unavailable

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef unsigned long long u64;
struct gpu { u64 lost, action, errors, uncorrected, pending, failed, slow, sram, pages; };
static struct gpu gpus[2];
static u64 count = 2, capability = 86, init, old, events[8][3];
static int waiting, watched, opened;
static const char *ids[2] = {"GPU-aaaa", "GPU-bbbb"};

void fake_reset(void) {
    memset(gpus, 0, sizeof gpus);
    count = 2; capability = 86; init = old = 0; waiting = watched = opened = 0;
}
int fake_opened(void) { return opened; }
void fake_set(const char *what, int gpu, u64 value) {
    struct gpu *g = &gpus[gpu];
    if (!strcmp(what, "count")) count = value;
    if (!strcmp(what, "capability")) capability = value;
    if (!strcmp(what, "init")) init = value;
    if (!strcmp(what, "old")) old = value;
    if (!strcmp(what, "lost")) g->lost = value;
    if (!strcmp(what, "action")) g->action = value;
    if (!strcmp(what, "errors")) g->errors = value;
    if (!strcmp(what, "uncorrected")) g->uncorrected = value;
    if (!strcmp(what, "pending")) g->pending = value;
    if (!strcmp(what, "failed")) g->failed = value;
    if (!strcmp(what, "slow")) g->slow = value;
    if (!strcmp(what, "sram")) g->sram = value;
    if (!strcmp(what, "pages")) g->pages = value;
}
void fake_event(int gpu, u64 kind, u64 data) {
    u64 each[3] = {gpu, kind, data};
    memcpy(events[waiting++], each, sizeof each);
}

int nvmlInit_v2(void) { if (init) return (int)init; opened++; return 0; }
int nvmlShutdown(void) { opened--; return 0; }
const char *nvmlErrorString(int code) {
    return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded"
         : code == 18 ? "Driver/library version mismatch" : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    if (length < 80) return 7;
    strcpy(text, "580.95.05");
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *found) { *found = (unsigned)count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **handle) {
    if (index >= count) return 2;
    *handle = &gpus[index];
    return gpus[index].lost == 28 ? 28 : 0;
}
int nvmlDeviceGetHandleByUUID(const char *id, struct gpu **handle) {
    for (unsigned i = 0; i < count; i++)
        if (!strcmp(id, ids[i])) return nvmlDeviceGetHandleByIndex_v2(i, handle);
    return 6;
}
int nvmlDeviceGetMemoryInfo(struct gpu *g, u64 *memory) {
    const char *lost = getenv("FAKE_LOST");  /* a file: while it is there, the first GPU is lost */
    memory[0] = 16ull << 30; memory[1] = 14ull << 30; memory[2] = 2ull << 30;
    if (lost && g == gpus && !access(lost, F_OK)) return 15;
    return (int)g->lost;
}
int nvmlDeviceGetName(struct gpu *g, char *text, unsigned size) {
    if (size < 96) return 7;
    strcpy(text, capability >= 90 ? "NVIDIA H200" : "NVIDIA A10G");
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(struct gpu *g, int *major, int *minor) {
    *major = (int)capability / 10; *minor = (int)capability % 10;
    return (int)g->lost;
}
struct memory { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct gpu *g, struct memory *found) {
    if (old) return 3;
    if (found->version != (sizeof(struct memory) | 2u << 24)) return 25;
    found->total = 16ull << 30; found->free = 14ull << 30;
    found->reserved = found->used = 1ull << 30;
    return (int)g->lost;
}
int nvmlDeviceGetUtilizationRates(struct gpu *g, unsigned *rates) {
    rates[0] = g == gpus ? 40 : 80; rates[1] = 1;
    return 0;
}
/* Process 4 computes on both, 5 on the second alone. */
struct process { unsigned pid; u64 held; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *g, unsigned *count, struct process *all) {
    unsigned there = g == gpus ? 1 : 2;
    if (old) return 3;
    if (*count < there) return 7;
    all[0].pid = 4; all[0].held = 300ull << 20;
    if (there == 2) { all[1].pid = 5; all[1].held = ~0ull; }
    *count = there;
    return 0;
}
struct value { unsigned field, scope; long long at, took; unsigned kind; int failed; u64 value; };
int nvmlDeviceGetFieldValues(struct gpu *g, int number, struct value *v) {
    if (number != 1 || v->field != 230) return 2;
    v->failed = old ? 3 : 0; v->kind = 1;
    v->value = 0xdead00000000ull | g->action;  /* of a union only the first half is written */
    return 0;
}
int nvmlDeviceGetTotalEccErrors(struct gpu *g, int kind, int counter, u64 *found) {
    if (kind != 1 || counter != 0) return 2;
    *found = g->errors;
    return 0;
}
int nvmlDeviceGetRemappedRows(struct gpu *g, unsigned *corrected, unsigned *uncorrected,
                              unsigned *pending, unsigned *failed) {
    if (old) return 3;
    *corrected = 0; *uncorrected = (unsigned)g->uncorrected;
    *pending = (unsigned)g->pending; *failed = (unsigned)g->failed;
    return 0;
}
int nvmlDeviceGetRetiredPagesPendingStatus(struct gpu *g, unsigned *pending) {
    if (!old) return 3;  /* cards that remap rows retire no pages */
    *pending = (unsigned)g->pages;
    return 0;
}
struct sram { unsigned version; u64 counts[11]; unsigned above; };
int nvmlDeviceGetSramEccErrorStatus(struct gpu *g, struct sram *found) {
    if (old) return 3;
    if (found->version != (sizeof(struct sram) | 1u << 24)) return 25;
    found->above = (unsigned)g->sram;
    return 0;
}
/* As older drivers have it: the newer name is not there. */
int nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *g, u64 *found) {
    *found = g->slow | 1;  /* and that it is idle, which is no trouble */
    return 0;
}
int nvmlEventSetCreate(void **set) { *set = events; return 0; }
int nvmlEventSetFree(void *set) { return set == events ? 0 : 2; }
int nvmlDeviceGetSupportedEventTypes(struct gpu *g, u64 *kinds) {
    *kinds = old ? 0x1f : 0xfe1f;
    return 0;
}
int nvmlDeviceRegisterEvents(struct gpu *g, u64 kinds, void *set) {
    if (set != events || (kinds & ~(old ? 0x1full : 0xfe1full))) return 3;
    watched++;
    return 0;
}
struct event { struct gpu *gpu; u64 kind, data; unsigned instance, compute; };
int nvmlEventSetWait_v2(void *set, struct event *found, unsigned wait) {
    const char *breaks = getenv("FAKE_XID_79");  /* a file: the first GPU breaks, once */
    if (set != events || wait != 0) return 2;
    if (breaks && !unlink(breaks)) fake_event(0, 8, 79);
    if (!waiting) return 10;
    found->gpu = &gpus[events[0][0]]; found->kind = events[0][1]; found->data = events[0][2];
    memmove(events[0], events[1], sizeof events - sizeof events[0]);
    waiting--;
    return 0;
}
"""

CUDA = r"""
#include <stdlib.h>
static int of(const char *name, int usual) {
    const char *text = getenv(name);
    return text ? atoi(text) : usual;
}
int cuInit(unsigned flags) { return of("FAKE_CUDA_INIT", 0); }
int cuDriverGetVersion(int *version) { *version = of("FAKE_CUDA_VERSION", 13000); return 0; }
"""


class FakeDriver:
    """The library, and what it is told to say."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._library = ctypes.CDLL(self._path)
        self.reset()

    def reset(self) -> None:
        """Two GPUs that are well, and no events."""
        self._library.fake_reset()

    def open(self) -> Nvml:
        """What the runtime opens instead of the machine's own."""
        return Nvml(self.load)

    def load(self, name: str) -> Any:
        """The library instead of the one of this name."""
        return ctypes.CDLL(self._path)

    def set(self, what: str, value: int, gpu: int = 0) -> None:
        self._library.fake_set(what.encode(), gpu, ctypes.c_ulonglong(value))

    def happen(self, kind: int, data: int, gpu: int = 0) -> None:
        """An event, which waits until it is asked for."""
        self._library.fake_event(gpu, ctypes.c_ulonglong(kind), ctypes.c_ulonglong(data))

    @property
    def users(self) -> int:
        """How many have opened it and not closed it."""
        found: Any = self._library.fake_opened()
        return int(found)


def build(folder: Path) -> Path:
    """NVML's library in this folder, beside CUDA's; the test is skipped if nothing can build it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        unavailable("needs a C compiler")
    for name, source in (("libnvidia-ml.so.1", SOURCE), ("libcuda.so.1", CUDA)):
        (folder / "driver.c").write_text(source)
        command = [compiler, "-shared", "-fPIC", "-o", str(folder / name), str(folder / "driver.c")]
        subprocess.run(command, check=True, timeout=60)
    return folder / "libnvidia-ml.so.1"
