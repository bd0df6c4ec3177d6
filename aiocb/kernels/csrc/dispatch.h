// Which instruction set runs on this processor.
#pragma once
#include "model.h"

namespace aiocb {

const InstructionSet* find_instruction_set(const char* name);  // null: the best; returns null where there is no such set
bool has_vnni();

}  // namespace aiocb
