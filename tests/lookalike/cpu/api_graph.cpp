// Exported functions: graphs.
#include <algorithm>

#include "api.h"

using namespace lookalike;

namespace lookalike {
host::Kernel* kernel_of(void* function);
void* function_of(host::Kernel* kernel);
} // namespace lookalike

namespace {

// hipKernelNodeParams.
struct KernelNode {
    u32 block[3];
    void** extra;
    void* function;
    u32 grid[3];
    void** parameters;
    u32 lds_bytes;
};
static_assert(sizeof(KernelNode) == 64, "as the runtime's headers have it");

Code make_work(u32 device, const KernelNode& node, Work& work) {
    host::Kernel* kernel = kernel_of(node.function);
    if (!kernel) return complain(hipErrorInvalidHandle, "%p is no function", node.function);
    return make_launch(device, kernel, node.grid, node.block, node.lds_bytes, node.parameters, node.extra, work);
}

template <class F> Code graph_call(const char* name, void* handle, F body) {
    return device_call(name, [&](u32 device) -> Code {
        Graph* graph = find_graph(handle);
        return graph ? body(*graph, device) : complain(hipErrorInvalidHandle, "%s: %p is no graph", name, handle);
    });
}

template <class F> Code instance_call(const char* name, void* handle, F body) {
    return device_call(name, [&](u32 device) -> Code {
        Instance* instance = find_instance(handle);
        return instance ? body(*instance, device)
                        : complain(hipErrorInvalidHandle, "%s: %p is no instance of a graph", name, handle);
    });
}

} // namespace

LOOKALIKE_API hipGraphCreate(void** graph, u32 flags) {
    return device_call("hipGraphCreate", [&](u32) -> Code {
        if (!graph || flags != 0) return hipErrorInvalidValue;
        *graph = make_graph(std::make_unique<Graph>());
        return hipSuccess;
    });
}

LOOKALIKE_API hipGraphDestroy(void* graph) {
    return device_call("hipGraphDestroy", [&](u32) { return destroy_graph(graph); });
}

LOOKALIKE_API hipGraphGetNodes(void* graph, void** nodes, size_t* count) {
    return graph_call("hipGraphGetNodes", graph, [&](Graph& g, u32) -> Code {
        if (!count) return hipErrorInvalidValue;
        size_t room = nodes ? std::min(*count, g.nodes.size()) : 0;
        for (size_t i = 0; i < room; i++) nodes[i] = g.nodes[i].get();
        *count = nodes ? room : g.nodes.size();
        return hipSuccess;
    });
}

LOOKALIKE_API hipGraphAddKernelNode(void** made, void* graph, void* const* after, size_t count, const KernelNode* node) {
    return graph_call("hipGraphAddKernelNode", graph, [&](Graph& g, u32 device) -> Code {
        if (!made || !node || (count != 0 && !after)) return hipErrorInvalidValue;
        auto added = std::make_unique<Node>();
        added->graph = &g;
        if (Code code = make_work(device, *node, added->work)) return code;
        for (size_t i = 0; i < count; i++) {
            auto found = std::find_if(g.nodes.begin(), g.nodes.end(), [&](auto& n) { return n.get() == after[i]; });
            if (found == g.nodes.end()) return complain(hipErrorInvalidValue, "a node comes after one of another graph");
            added->after.push_back((u32)(found - g.nodes.begin()));
        }
        *made = added.get();
        g.nodes.push_back(std::move(added));
        return hipSuccess;
    });
}

LOOKALIKE_API hipGraphKernelNodeGetParams(void* handle, KernelNode* node) {
    return device_call("hipGraphKernelNodeGetParams", [&](u32) -> Code {
        Node* found = find_node(handle);
        if (!node || !found || found->work.kind != Work::KERNEL) return hipErrorInvalidValue;
        const Work& work = found->work;
        *node = {{work.block[0], work.block[1], work.block[2]}, nullptr, function_of(work.kernel),
                 {work.grid[0], work.grid[1], work.grid[2]}, nullptr, work.lds_bytes};
        return hipSuccess;
    });
}

LOOKALIKE_API hipGraphKernelNodeSetParams(void* handle, const KernelNode* node) {
    return device_call("hipGraphKernelNodeSetParams", [&](u32) -> Code {
        Node* found = find_node(handle);
        if (!node || !found || found->work.kind != Work::KERNEL) return hipErrorInvalidValue;
        Work work;
        if (Code code = make_work(found->work.device, *node, work)) return code;
        found->work = work;
        return hipSuccess;
    });
}

LOOKALIKE_API hipGraphInstantiate(void** instance, void* graph, void** error_node, char* log, size_t log_bytes) {
    return graph_call("hipGraphInstantiate", graph, [&](Graph& g, u32) -> Code {
        if (!instance) return hipErrorInvalidValue;
        if (error_node) *error_node = nullptr;
        if (log && log_bytes) *log = 0;
        return instantiate(g, (Instance**)instance);
    });
}

LOOKALIKE_API hipGraphInstantiateWithFlags(void** instance, void* graph, unsigned long long flags) {
    return graph_call("hipGraphInstantiateWithFlags", graph, [&](Graph& g, u32) -> Code {
        return instance && flags == 0 ? instantiate(g, (Instance**)instance) : hipErrorInvalidValue;
    });
}

LOOKALIKE_API hipGraphExecDestroy(void* instance) {
    return device_call("hipGraphExecDestroy", [&](u32) { return destroy_instance(instance); });
}

LOOKALIKE_API hipGraphExecUpdate(void* instance, void* graph, void** error_node, u32* result) {
    return instance_call("hipGraphExecUpdate", instance, [&](Instance& i, u32) -> Code {
        Graph* g = find_graph(graph);
        if (!g || !result) return hipErrorInvalidValue;
        if (error_node) *error_node = nullptr;
        return update(i, *g, result);
    });
}

LOOKALIKE_API hipGraphExecKernelNodeSetParams(void* instance, void* handle, const KernelNode* node) {
    return instance_call("hipGraphExecKernelNodeSetParams", instance, [&](Instance& i, u32) -> Code {
        auto found = std::find(i.made_from.begin(), i.made_from.end(), (const Node*)handle);
        if (!node || found == i.made_from.end())
            return complain(hipErrorInvalidValue, "%p is no node of the graph this instance was made from", handle);
        auto changed = std::make_shared<std::vector<Node>>(*i.nodes);
        Work& work = (*changed)[(size_t)(found - i.made_from.begin())].work;
        host::Kernel* before = work.kernel;
        if (Code code = make_work(work.device, *node, work)) return code;
        if (work.kernel != before) return complain(hipErrorInvalidValue, "the node is of kernel %s", before->name);
        i.nodes = changed;
        return hipSuccess;
    });
}

LOOKALIKE_API hipGraphLaunch(void* instance, void* handle) {
    return stream_call("hipGraphLaunch", handle, [&](Stream& stream) -> Code {
        Instance* found = find_instance(instance);
        if (!found) return complain(hipErrorInvalidHandle, "%p is no instance of a graph", instance);
        if (Code code = refuse_for_stream(stream, "hipGraphLaunch")) return code;
        return launch(*found, stream);
    });
}
