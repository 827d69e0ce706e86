// Sums and maxima over 32 neighbouring lanes and over a block, in one order for waves of 32 and of 64.
//
// A "team" is 32 lanes whose first thread is a multiple of 32: a whole wave, or half of one. All reductions go through
// teams, so that the same input gives the same bits at both wave sizes. All lanes of the wave call together.
#pragma once
#include "../prelude/prelude.h"

constexpr u32 TEAM = 32;
// Teams of the largest block.
constexpr u32 TEAMS_MAX = 32;

DEV u32 team_lane() { return thread_id() % TEAM; }
DEV u32 team_id() { return thread_id() / TEAM; }

template <class T> DEV T team_sum(T v) { return wave_sum<TEAM>(v); }
// NaNs are ignored.
template <class T> DEV T team_max(T v) { return wave_max<TEAM>(v); }

// Over the block: a tree in each team, then one over the teams. `room` holds TEAMS_MAX values in LDS. The caller puts a barrier
// between two uses of one room.
template <class T> DEV T teams_sum(T v, T* room) {
    v = team_sum(v);
    if (team_lane() == 0) room[team_id()] = v;
    barrier_lds();
    return team_sum(team_lane() < block_threads() / TEAM ? room[team_lane()] : T(0));
}

// Of values that are 0 or more.
template <class T> DEV T teams_max(T v, T* room) {
    v = team_max(v);
    if (team_lane() == 0) room[team_id()] = v;
    barrier_lds();
    return team_max(team_lane() < block_threads() / TEAM ? room[team_lane()] : T(0));
}
