#include "grid.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "settings.h"

namespace lookalike {
namespace {

struct Job {
    const Launch& launch;
    u64 blocks;
    // Turn i runs block i * stride + start modulo `blocks`: every block once, since stride and `blocks` share no factor.
    u64 stride, start;
    std::atomic<u64> next{0};
    std::atomic<bool> failed{false};
    u32 helpers = 0;
    std::mutex lock;
    std::string failure;

    explicit Job(const Launch& l) : launch(l), blocks((u64)l.grid[0] * l.grid[1] * l.grid[2]) {
        start = l.seed % blocks;
        stride = l.seed / 7 % blocks | 1;
        while (std::gcd(stride, blocks) != 1) stride++;
    }
    bool open() const { return next.load(std::memory_order_relaxed) < blocks; }
    void work();
};

void Job::work() {
    for (;;) {
        u64 i = next.fetch_add(1);
        if (i >= blocks || failed.load()) return;
        u64 number = (u64)((unsigned __int128)i * stride % blocks + start) % blocks;
        u32 at[3] = {(u32)(number % launch.grid[0]), (u32)(number / launch.grid[0] % launch.grid[1]),
                     (u32)(number / launch.grid[0] / launch.grid[1])};
        std::string text = run_block(launch, at);
        if (text.empty()) continue;
        std::lock_guard<std::mutex> guard(lock);
        if (!failed.exchange(true))
            failure = text + " (block " + std::to_string(at[0]) + "," + std::to_string(at[1]) + "," + std::to_string(at[2]) + ")";
        next.store(blocks);
    }
}

// Threads that help with any open grid. They run until the process ends.
class Helpers {
public:
    explicit Helpers(u32 count) {
        for (u32 i = 0; i < count; i++) std::thread([this] { serve(); }).detach();
    }
    void help(Job& job) {
        {
            std::lock_guard<std::mutex> guard(lock);
            jobs.push_back(&job);
        }
        come.notify_all();
        job.work();
        std::unique_lock<std::mutex> guard(lock);
        jobs.erase(std::find(jobs.begin(), jobs.end(), &job));
        gone.wait(guard, [&] { return job.helpers == 0; });
    }

private:
    void serve() {
        std::unique_lock<std::mutex> guard(lock);
        for (;;) {
            auto open = std::find_if(jobs.begin(), jobs.end(), [](Job* job) { return job->open(); });
            if (open == jobs.end()) {
                come.wait(guard);
                continue;
            }
            Job& job = **open;
            job.helpers++;
            guard.unlock();
            job.work();
            guard.lock();
            if (--job.helpers == 0) gone.notify_all();
        }
    }

    std::mutex lock;
    std::condition_variable come, gone;
    std::vector<Job*> jobs;
};

} // namespace

std::string run_grid(const Launch& launch) {
    static Helpers& helpers = *new Helpers(settings().threads - 1);
    Job job(launch);
    if (job.blocks == 1) job.work();
    else helpers.help(job);
    return job.failure;
}

} // namespace lookalike
