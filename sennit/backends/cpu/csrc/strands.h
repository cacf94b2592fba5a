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

// The most rows of an item that the narrow strand takes; matrix registers are faster from fewer rows on.
#if defined(SENNIT_AMX)
constexpr int kNarrowRows = std::is_same_v<Query, bf16> && std::is_same_v<Stored, bf16> ? 8 : W;
#else
constexpr int kNarrowRows = W;
#endif

void run_wide(const AttentionLaunch&, const Item&, Scratch&);
void run_narrow(const AttentionLaunch&, const Item&, Scratch&);

}  // namespace sennit
