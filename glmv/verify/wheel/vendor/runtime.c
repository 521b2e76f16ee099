/* The vendor runtime on host memory: enough of it for torch_npu to start, see devices, and hold tensors on them.

   Device memory is the process's own memory. Streams do everything before a call returns, so that whatever asks whether
   work is finished hears yes. No operator runs here: computing is what the meta kernels and the contract are for.
   Declarations come from the headers that the wheel carries; the compiler refuses a function that differs from them. */

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

/* Devices. Their number is settled by whoever starts the process. */

static __thread int32_t current_device = 0;
static int one_context;

static int32_t device_count(void) {
    const char *text = getenv("GLMV_STAND_IN_DEVICES");
    return text == NULL ? 1 : atoi(text);
}

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)device_count();
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
    *device = current_device;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count()) return ACL_ERROR_INVALID_DEVICE;
    current_device = device;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    *context = &one_context;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    (void)device;
    if (flags != NULL) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

/* torch_npu asks for the chip's name and chooses code paths by it. */
const char *aclrtGetSocName(void) {
    const char *name = getenv("GLMV_STAND_IN_SOC");
    return name == NULL ? "Ascend910B3" : name;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    (void)device, (void)attribute;
    *value = 24; /* cores, whichever kind was asked for */
    return ACL_SUCCESS;
}

/* Settings that have nothing to act upon here. */

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    (void)mode;
    return ACL_SUCCESS;
}

aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) {
    (void)seconds;
    return ACL_SUCCESS;
}

aclError aclrtSetOpWaitTimeout(uint32_t seconds) {
    (void)seconds;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    (void)option;
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    (void)option, (void)value;
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

const char *aclGetRecentErrMsg(void) { return ""; }

/* Memory. Blocks are aligned as on the device. */

enum { ALIGNMENT = 512 };

aclError aclrtMalloc(void **block, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy;
    *block = aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    return *block == NULL ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **block, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(block, size, policy);
}

aclError aclrtMallocHost(void **block, size_t size) { return aclrtMalloc(block, size, ACL_MEM_MALLOC_HUGE_FIRST); }

aclError aclrtFree(void *block) {
    free(block);
    return ACL_SUCCESS;
}

aclError aclrtFreeHost(void *block) { return aclrtFree(block); }

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total) {
    (void)attribute;
    *available = *total = (size_t)64 << 30;
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind) {
    (void)kind;
    if (count > room) return ACL_ERROR_INVALID_PARAM;
    memmove(to, from, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind, aclrtStream stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, count, kind);
}

aclError aclrtMemset(void *block, size_t room, int32_t value, size_t count) {
    if (count > room) return ACL_ERROR_INVALID_PARAM;
    memset(block, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *block, size_t room, int32_t value, size_t count, aclrtStream stream) {
    (void)stream;
    return aclrtMemset(block, room, value, count);
}

/* Streams: a number each. */

static int32_t streams_made = 0;

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    (void)priority, (void)flag;
    int32_t *made = malloc(sizeof *made);
    if (made == NULL) return ACL_ERROR_BAD_ALLOC;
    *made = __atomic_add_fetch(&streams_made, 1, __ATOMIC_RELAXED);
    *stream = made;
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
    free(stream);
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = stream == NULL ? 0 : *(int32_t *)stream;
    return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    (void)stream;
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

/* Events: the moment of their recording. */

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    (void)flag;
    *event = calloc(1, sizeof(struct timespec));
    return *event == NULL ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
    free(event);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, event);
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    (void)event;
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    (void)event;
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    const struct timespec *from = start, *to = end;
    *milliseconds = (to->tv_sec - from->tv_sec) * 1e3 + (to->tv_nsec - from->tv_nsec) / 1e6;
    return ACL_SUCCESS;
}

/* Compiler options: none is kept. torch_npu sizes a buffer by one answer and reads the other as text. */

aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    (void)option, (void)value;
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt option) {
    (void)option;
    return 1;
}

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    (void)option;
    if (length > 0) value[0] = '\0';
    return ACL_SUCCESS;
}
