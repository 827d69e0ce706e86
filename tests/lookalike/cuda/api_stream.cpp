// Exported functions: streams, events, graphs.
#include "driver.h"

using namespace lookalike;

LOOKALIKE_API hipStreamCreateWithPriority(CUstream* stream, uint32_t flags, int priority) {
    constexpr uint32_t NON_BLOCKING = 1; // hipStreamNonBlocking
    if (!stream || (flags & ~NON_BLOCKING) != 0) return INVALID_VALUE;
    uint32_t wanted = flags & NON_BLOCKING ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
    return device_call([&](const Driver& cuda) { return cuda.cuStreamCreateWithPriority_(stream, wanted, priority); });
}

LOOKALIKE_API hipStreamDestroy(CUstream stream) {
    return device_call([&](const Driver& cuda) { return cuda.cuStreamDestroy_(stream); });
}

LOOKALIKE_API hipStreamQuery(CUstream stream) {
    return device_call([&](const Driver& cuda) { return cuda.cuStreamQuery_(stream); });
}

LOOKALIKE_API hipStreamSynchronize(CUstream stream) {
    return device_call([&](const Driver& cuda) { return cuda.cuStreamSynchronize_(stream); });
}

LOOKALIKE_API hipStreamWaitEvent(CUstream stream, CUevent event, uint32_t flags) {
    if (flags != 0) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) { return cuda.cuStreamWaitEvent_(stream, event, CU_EVENT_WAIT_DEFAULT); });
}

LOOKALIKE_API hipStreamBeginCapture(CUstream stream, uint32_t mode) {
    CUstreamCaptureMode wanted;
    switch (mode) { // hipStreamCaptureMode
    case 0: wanted = CU_STREAM_CAPTURE_MODE_GLOBAL; break;
    case 1: wanted = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL; break;
    case 2: wanted = CU_STREAM_CAPTURE_MODE_RELAXED; break;
    default: return INVALID_VALUE;
    }
    return device_call([&](const Driver& cuda) { return cuda.cuStreamBeginCapture_(stream, wanted); });
}

LOOKALIKE_API hipStreamEndCapture(CUstream stream, CUgraph* graph) {
    if (!graph) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) { return cuda.cuStreamEndCapture_(stream, graph); });
}

LOOKALIKE_API hipEventCreateWithFlags(CUevent* event, uint32_t flags) {
    constexpr uint32_t BLOCKING_SYNC = 1, DISABLE_TIMING = 2; // hipEventBlockingSync, hipEventDisableTiming
    if (!event || (flags & ~(BLOCKING_SYNC | DISABLE_TIMING)) != 0) return INVALID_VALUE;
    uint32_t wanted = CU_EVENT_DEFAULT;
    if (flags & BLOCKING_SYNC) wanted |= CU_EVENT_BLOCKING_SYNC;
    if (flags & DISABLE_TIMING) wanted |= CU_EVENT_DISABLE_TIMING;
    return device_call([&](const Driver& cuda) { return cuda.cuEventCreate_(event, wanted); });
}

LOOKALIKE_API hipEventDestroy(CUevent event) {
    return device_call([&](const Driver& cuda) { return cuda.cuEventDestroy_(event); });
}

LOOKALIKE_API hipEventRecord(CUevent event, CUstream stream) {
    return device_call([&](const Driver& cuda) { return cuda.cuEventRecord_(event, stream); });
}

LOOKALIKE_API hipEventQuery(CUevent event) {
    return device_call([&](const Driver& cuda) { return cuda.cuEventQuery_(event); });
}

LOOKALIKE_API hipEventSynchronize(CUevent event) {
    return device_call([&](const Driver& cuda) { return cuda.cuEventSynchronize_(event); });
}

LOOKALIKE_API hipEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    if (!milliseconds) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) { return cuda.cuEventElapsedTime_(milliseconds, start, end); });
}

LOOKALIKE_API hipGraphDestroy(CUgraph graph) {
    return device_call([&](const Driver& cuda) { return cuda.cuGraphDestroy_(graph); });
}

LOOKALIKE_API hipGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    if (!count) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) { return cuda.cuGraphGetNodes_(graph, nodes, count); });
}

LOOKALIKE_API hipGraphInstantiate(CUgraphExec* made, CUgraph graph, CUgraphNode* error_node, char* log, size_t log_bytes) {
    if (!made) return INVALID_VALUE;
    if (error_node) *error_node = nullptr;
    if (log && log_bytes > 0) *log = 0;
    return device_call([&](const Driver& cuda) { return cuda.cuGraphInstantiateWithFlags_(made, graph, 0); });
}

LOOKALIKE_API hipGraphExecDestroy(CUgraphExec graph) {
    return device_call([&](const Driver& cuda) { return cuda.cuGraphExecDestroy_(graph); });
}

LOOKALIKE_API hipGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* error_node, uint32_t* updated) {
    if (!error_node || !updated) return INVALID_VALUE;
    return device_call([&](const Driver& cuda) {
        CUgraphExecUpdateResultInfo info{};
        CUresult result = cuda.cuGraphExecUpdate_(exec, graph, &info);
        *error_node = info.errorNode;
        switch (info.result) { // hipGraphExecUpdateResult
        case CU_GRAPH_EXEC_UPDATE_SUCCESS: *updated = 0; break;
        case CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED: *updated = 2; break;
        case CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED: *updated = 3; break;
        case CU_GRAPH_EXEC_UPDATE_ERROR_FUNCTION_CHANGED: *updated = 4; break;
        case CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED: *updated = 5; break;
        case CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED: *updated = 6; break;
        case CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE: *updated = 7; break;
        default: *updated = 1;
        }
        return result;
    });
}

LOOKALIKE_API hipGraphLaunch(CUgraphExec exec, CUstream stream) {
    return device_call([&](const Driver& cuda) { return cuda.cuGraphLaunch_(exec, stream); });
}
