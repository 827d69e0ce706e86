#include "graph.h"

#include <algorithm>
#include <map>
#include <unordered_set>

#include "counters.h"
#include "engine.h"

namespace lookalike {
namespace {

template <class T> struct Handles {
    std::map<void*, std::unique_ptr<T>> all;
    T* find(void* handle) {
        auto found = all.find(handle);
        return found == all.end() ? nullptr : found->second.get();
    }
    T* add(std::unique_ptr<T> made) {
        T* handle = made.get();
        all[handle] = std::move(made);
        return handle;
    }
};

Handles<Graph>& graphs() {
    static auto& all = *new Handles<Graph>;
    return all;
}

Handles<Instance>& instances() {
    static auto& all = *new Handles<Instance>;
    return all;
}

std::vector<std::weak_ptr<Capture>>& captures() {
    static auto& all = *new std::vector<std::weak_ptr<Capture>>;
    return all;
}

void add_to(std::vector<u32>& list, u32 node) {
    if (std::find(list.begin(), list.end(), node) == list.end()) list.push_back(node);
}

// Whether every node of the capture comes before the origin's tail, so that the origin waits for every forked stream.
bool joined(const Capture& capture) {
    std::vector<bool> reached(capture.graph->nodes.size());
    std::vector<u32> open = capture.origin->tail;
    while (!open.empty()) {
        u32 node = open.back();
        open.pop_back();
        if (reached[node]) continue;
        reached[node] = true;
        for (u32 before : capture.graph->nodes[node]->after) open.push_back(before);
    }
    return std::find(reached.begin(), reached.end(), false) == reached.end();
}

void join(Stream& stream, const std::shared_ptr<Capture>& capture) {
    stream.capture = capture;
    stream.tail.clear();
    capture->streams.push_back(&stream);
}

// A launch of an instance: runs its nodes in an order that respects their dependencies.
class Replay : public std::enable_shared_from_this<Replay> {
public:
    explicit Replay(std::shared_ptr<std::vector<Node>> all) : nodes(std::move(all)), missing(nodes->size()) {
        for (u32 i = 0; i < nodes->size(); i++) {
            missing[i] = (u32)(*nodes)[i].after.size();
            if (missing[i] == 0) ready.push_back(i);
        }
    }

    Code run(Stream& stream) {
        while (!ready.empty()) {
            // The latest first, so that independent nodes do not always run in the order of their capture.
            u32 node = ready.back();
            ready.pop_back();
            if (Code code = run_scripted((*nodes)[node].work, stream)) return code;
            if (stream.rest) {
                stream.rest = [self = shared_from_this(), node, held = std::move(stream.rest), on = &stream]() -> Code {
                    if (Code code = held()) return code;
                    self->finish(node);
                    return self->run(*on);
                };
                return hipSuccess;
            }
            finish(node);
        }
        return hipSuccess;
    }

private:
    void finish(u32 node) {
        for (u32 i = 0; i < nodes->size(); i++) {
            const std::vector<u32>& after = (*nodes)[i].after;
            if (std::find(after.begin(), after.end(), node) != after.end() && --missing[i] == 0) ready.push_back(i);
        }
    }

    std::shared_ptr<std::vector<Node>> nodes;
    std::vector<u32> missing, ready;
};

std::shared_ptr<std::vector<Node>> copy_nodes(const Graph& graph) {
    auto nodes = std::make_shared<std::vector<Node>>();
    for (auto& node : graph.nodes) nodes->push_back(*node);
    return nodes;
}

} // namespace

Code begin_capture(Stream& stream, u32 mode) {
    if (mode > 2) return hipErrorInvalidValue;
    if (stream.capture) return complain(hipErrorStreamCaptureUnsupported, "this stream captures already");
    auto capture = std::make_shared<Capture>();
    capture->graph = std::make_unique<Graph>();
    capture->origin = &stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    captures().push_back(capture);
    join(stream, capture);
    return hipSuccess;
}

Code end_capture(Stream& stream, Graph** graph) {
    *graph = nullptr;
    std::shared_ptr<Capture> capture = stream.capture;
    if (!capture) return complain(hipErrorInvalidValue, "this stream captures nothing");
    if (capture->origin != &stream) return complain(hipErrorStreamCaptureUnmatched, "another stream began this capture");
    bool whole = joined(*capture);
    for (Stream* joined_stream : capture->streams) {
        joined_stream->capture.reset();
        joined_stream->tail.clear();
    }
    if (capture->invalid) return hipErrorStreamCaptureInvalidated;
    if (!whole) return complain(hipErrorStreamCaptureUnjoined, "no stream waits for the work of a forked stream");
    *graph = make_graph(std::move(capture->graph));
    return hipSuccess;
}

Code capture_work(Stream& stream, const Work& work) {
    Capture& capture = *stream.capture;
    if (capture.invalid) return hipErrorStreamCaptureInvalidated;
    auto& nodes = capture.graph->nodes;
    nodes.push_back(std::make_unique<Node>(Node{work, stream.tail, capture.graph.get()}));
    stream.tail = {(u32)nodes.size() - 1};
    return hipSuccess;
}

Code capture_record(Stream& stream, Event& event) {
    event.capture = stream.capture;
    event.in_capture = true;
    event.nodes = stream.tail;
    return hipSuccess;
}

Code capture_wait(Stream& stream, Event& event) {
    std::shared_ptr<Capture> capture = event.capture.lock();
    bool open = capture && capture->graph && !capture->invalid;
    if (!open) {
        if (!stream.capture) return complain(hipErrorCapturedEvent, "the capture in which this event was recorded is over");
        stream.capture->invalid = true;
        return complain(hipErrorStreamCaptureUnsupported, "a captured wait for an event from outside the capture");
    }
    if (stream.capture && stream.capture != capture) {
        stream.capture->invalid = capture->invalid = true;
        return complain(hipErrorStreamCaptureMerge, "this joins two captures");
    }
    if (!stream.capture) join(stream, capture);
    for (u32 node : event.nodes) add_to(stream.tail, node);
    return hipSuccess;
}

Code refuse_in_capture(const char* call) {
    for (auto& known : captures()) {
        std::shared_ptr<Capture> capture = known.lock();
        if (!capture || !capture->graph) continue;
        bool forbidden = capture->mode == 0 || (capture->mode == 1 && capture->thread == std::this_thread::get_id());
        if (!forbidden) continue;
        capture->invalid = true;
        return complain(hipErrorStreamCaptureUnsupported, "%s while a stream captures", call);
    }
    return hipSuccess;
}

Code refuse_for_stream(Stream& stream, const char* call) {
    if (!stream.capture) return hipSuccess;
    stream.capture->invalid = true;
    return complain(hipErrorStreamCaptureUnsupported, "%s of a stream that captures", call);
}

Code instantiate(const Graph& graph, Instance** instance) {
    auto made = std::make_unique<Instance>();
    made->nodes = copy_nodes(graph);
    for (auto& node : graph.nodes) made->made_from.push_back(node.get());
    *instance = instances().add(std::move(made));
    return hipSuccess;
}

Code update(Instance& instance, const Graph& graph, u32* result) {
    constexpr u32 SUCCESS = 0, TOPOLOGY = 2, TYPE = 3, FUNCTION = 4;
    auto differs = [&]() -> u32 {
        if (instance.nodes->size() != graph.nodes.size()) return TOPOLOGY;
        for (u32 i = 0; i < graph.nodes.size(); i++) {
            const Node &old = (*instance.nodes)[i], &now = *graph.nodes[i];
            if (old.after != now.after) return TOPOLOGY;
            if (old.work.kind != now.work.kind) return TYPE;
            // Runtimes differ in whether they accept another function here; the strictest refuses it.
            if (old.work.kernel != now.work.kernel) return FUNCTION;
        }
        return SUCCESS;
    };
    *result = differs();
    if (*result != SUCCESS) return hipErrorGraphExecUpdateFailure;
    instance.nodes = copy_nodes(graph);
    return hipSuccess;
}

Code launch(Instance& instance, Stream& stream) {
    u64 turn = instance.launched++;
    Instance* self = &instance;
    auto nodes = instance.nodes;
    Stream* on = &stream;
    enqueue(
        stream,
        [nodes, on] {
            count("graph launches", 1);
            return std::make_shared<Replay>(nodes)->run(*on);
        },
        // Launches of one instance never overlap.
        [self, turn] { return self->finished == turn; }, [self] { self->finished++; });
    return hipSuccess;
}

Graph* find_graph(void* handle) { return graphs().find(handle); }
Instance* find_instance(void* handle) {
    Instance* found = instances().find(handle);
    return found && found->nodes ? found : nullptr;
}
Graph* make_graph(std::unique_ptr<Graph> graph) { return graphs().add(std::move(graph)); }

Node* find_node(void* handle) {
    for (auto& [_, graph] : graphs().all)
        for (auto& node : graph->nodes)
            if (node.get() == handle) return node.get();
    return nullptr;
}

Code destroy_graph(void* handle) {
    return graphs().all.erase(handle) == 1 ? hipSuccess : complain(hipErrorInvalidValue, "%p is no graph", handle);
}

Code destroy_instance(void* handle) {
    Instance* instance = find_instance(handle);
    if (!instance) return complain(hipErrorInvalidValue, "%p is no instance of a graph", handle);
    // Launches in flight still count their end here, so the object stays, without its nodes.
    instance->nodes.reset();
    return hipSuccess;
}

} // namespace lookalike
