// The two strands, each compiled by itself.
#pragma once

#include "launch.h"
#include "scratch.h"

namespace sennit {

#if !defined(SENNIT_QUERY)
#define SENNIT_QUERY float
#define SENNIT_STORED float
#endif
using Query = SENNIT_QUERY;    // dtype of queries and outputs
using Stored = SENNIT_STORED;  // dtype of keys and values
using AttentionLaunch = Launch<Query, Stored>;

constexpr int kNarrowRows = W;  // the most rows of an item that the narrow strand takes

void run_wide(const AttentionLaunch&, const Item&, Scratch&);
void run_narrow(const AttentionLaunch&, const Item&, Scratch&);

}  // namespace sennit
