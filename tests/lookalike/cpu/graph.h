// Graphs: work with an order, captured from streams or built node by node; and their instances.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "errors.h"
#include "work.h"

namespace lookalike {

struct Stream;
struct Event;
struct Graph;

struct Node {
    Work work;
    // The nodes that come before, as indices in the graph's list.
    std::vector<u32> after;
    Graph* graph;
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
};

// A running capture.
struct Capture {
    std::unique_ptr<Graph> graph;
    Stream* origin;
    // hipStreamCaptureMode: 0 forbids unsafe calls everywhere, 1 on the capturing thread, 2 nowhere.
    u32 mode;
    std::thread::id thread;
    bool invalid = false;
    std::vector<Stream*> streams;
};

struct Instance {
    // A launch in flight keeps the list with which it was launched.
    std::shared_ptr<std::vector<Node>> nodes;
    // The graph's nodes that `nodes` copies: handles for updates.
    std::vector<const Node*> made_from;
    u64 launched = 0, finished = 0;
};

// The caller of every function below holds the engine's lock.
Code begin_capture(Stream& stream, u32 mode);
Code end_capture(Stream& stream, Graph** graph);
// Adds work to the capture of `stream`.
Code capture_work(Stream& stream, const Work& work);
Code capture_record(Stream& stream, Event& event);
Code capture_wait(Stream& stream, Event& event);
// The error of a call that is forbidden while a stream captures. Invalidates that capture.
Code refuse_in_capture(const char* call);
Code refuse_for_stream(Stream& stream, const char* call);

Code instantiate(const Graph& graph, Instance** instance);
// hipGraphExecUpdateResult in `result`.
Code update(Instance& instance, const Graph& graph, u32* result);
Code launch(Instance& instance, Stream& stream);

Graph* find_graph(void* handle);
Instance* find_instance(void* handle);
Node* find_node(void* handle);
Graph* make_graph(std::unique_ptr<Graph> graph);
Code destroy_graph(void* handle);
Code destroy_instance(void* handle);

} // namespace lookalike
