// Scripted faults. A script is a list of rules, separated by spaces:
//
//   hipMalloc:3=2            the third hipMalloc from now returns code 2 and does nothing
//   hipMalloc:3+=2           so do the third and all later calls
//   kernel.norm_f32:1=719    the first run of that kernel fails while it runs: the device is in error from then on
//   kernel.*:5=hang          the fifth run of any kernel does not end until release_hung()
//   hipMemcpyAsync:2=lost    that call and all later calls on any device return 719; work in flight fails
//
// Calls count from the moment their rule is set. An unknown rule ends the process: a typing error must not make a test pass.
#pragma once

#include <string>

#include "errors.h"

namespace lookalike {

struct Fault {
    enum Kind { NONE, RETURN, HANG, LOST } kind = NONE;
    Code code = 0;
};

// Replaces all rules.
void set_faults(const std::string& script);
// Counts an occurrence of `name` and returns its fault.
Fault next_fault(const std::string& name);

} // namespace lookalike
