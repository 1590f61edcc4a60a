#include "step_arguments.h"

namespace layerzero {

namespace {

constexpr const char* kOp = "flat_step_";

// Of a contiguous tensor on `device`; `itemsize` bytes an element.
void* memory(const Handle& tensor, const char* what, Device device, int64_t itemsize) {
  const int64_t numel = numel_of(tensor);
  if (numel == 0) return nullptr;
  if (!is_contiguous(tensor)) refuse(kOp, ": ", what, " must be contiguous");
  if (!(device_of(tensor) == device))
    refuse(kOp, ": ", what, " is on ", name_of(device_of(tensor)), ", expected ", name_of(device));
  int64_t held = 0;
  int64_t offset = 0;
  check_call(aoti_torch_get_storage_size(tensor.get(), &held), "storage_size");
  check_call(aoti_torch_get_storage_offset(tensor.get(), &offset), "storage_offset");
  if (held < (offset + numel) * itemsize)
    refuse(kOp, ": the storage of ", what, " holds ", held, " bytes, the tensor needs ",
           (offset + numel) * itemsize, "; its memory was freed");
  void* data = nullptr;
  check_call(aoti_torch_get_data_ptr(tensor.get(), &data), "data_ptr");
  return data;
}

void expect_dtype(const Handle& tensor, int32_t scalar_type, const char* what, const char* name) {
  if (numel_of(tensor) > 0 && scalar_type_of(tensor) != scalar_type)
    refuse(kOp, ": ", what, " must be ", name, ", got scalar type ", scalar_type_of(tensor));
}

StateForm form_of(const Handle& state, layerzero_dtype main) {
  const int32_t scalar_type = scalar_type_of(state);
  if (scalar_type == (main == LZ_FLOAT64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32()))
    return kFullState;
  if (main != LZ_FLOAT64 && scalar_type == aoti_torch_dtype_bfloat16()) return kBfloatState;
  if (main != LZ_FLOAT64 && scalar_type == aoti_torch_dtype_uint8()) return kQuantState;
  refuse(kOp, ": states must be float32 (float64 for float64), bfloat16 or uint8, got scalar type ",
         scalar_type);
}

}  // namespace

// (kind, main, grad, states, scales, copy, edges, table, rows, factor, grad_scale, seed, mode)
StepArguments::StepArguments(StableIValue* stack) : states(stack[3]), scales(stack[4]) {
  for (const int i : {1, 2, 5, 6, 7, 8, 9}) held.emplace_back(unbox<AtenTensorHandle>(stack[i]));
  const Handle& main_tensor = held[0];
  const Handle& grad = held[1];
  const Handle& copy = held[2];
  const Handle& edges = held[3];
  const Handle& table = held[4];
  const Handle& rows = held[5];
  const Handle& factor_tensor = held[6];

  job.kind = static_cast<int>(unbox<int64_t>(stack[0]));
  if (job.kind < kAdamW || job.kind > kLion) refuse(kOp, ": unknown kind ", job.kind);
  main = check_output(main_tensor, kOp);
  job.dtype = main.dtype;
  job.main = static_cast<char*>(main.data);
  if (dtype_of(grad, kOp, "grad", -1) != main.dtype)
    refuse(kOp, ": grad must be ", name_of(main.dtype), ", as main is");
  job.grad = static_cast<const char*>(memory(grad, "grad", main.device, size_of(main.dtype)));

  job.num_states = static_cast<int>(states.tensors.size());
  if (job.num_states > 3 || (job.kind == kAdamW && job.num_states < 2) ||
      (job.kind == kLion && job.num_states != 1))
    refuse(kOp, ": got ", job.num_states, " states");
  for (int i = 0; i < job.num_states; ++i) {
    const Handle& state = states.tensors[i];
    const StateForm form = form_of(state, main.dtype);
    if (i > 0 && form != job.form) refuse(kOp, ": states must have one dtype");
    job.form = form;
    if (numel_of(state) != numel_of(states.tensors[0]))
      refuse(kOp, ": state ", i, " has ", numel_of(state), " elements, state 0 has ",
             numel_of(states.tensors[0]));
    const int64_t itemsize = form == kQuantState ? 1
                             : form == kBfloatState
                                 ? 2
                                 : size_of(main.dtype == LZ_FLOAT64 ? LZ_FLOAT64 : LZ_FLOAT32);
    job.states[i] = static_cast<char*>(memory(state, "a state", main.device, itemsize));
  }
  if (job.form == kQuantState) {
    if (scales.tensors.size() != states.tensors.size())
      refuse(kOp, ": got ", scales.tensors.size(), " scales for ", job.num_states, " states");
    for (int i = 0; i < job.num_states; ++i) {
      expect_dtype(scales.tensors[i], aoti_torch_dtype_float32(), "scales", "float32");
      job.scales[i] = static_cast<float*>(memory(scales.tensors[i], "scales", main.device, 4));
    }
  }

  if (numel_of(copy) > 0) {
    if (numel_of(copy) != main.numel)
      refuse(kOp, ": copy has ", numel_of(copy), " elements, main has ", main.numel);
    job.copy_dtype = dtype_of(copy, kOp, "copy", -1);
    job.copy = static_cast<char*>(memory(copy, "copy", main.device, size_of(job.copy_dtype)));
  }
  expect_dtype(edges, aoti_torch_dtype_float32(), "edges", "float32");
  job.edges = static_cast<float*>(memory(edges, "edges", main.device, 4));
  expect_dtype(table, aoti_torch_dtype_int64(), "table", "int64");
  if (numel_of(table) % kStepColumns != 0)
    refuse(kOp, ": table must be [R, ", kStepColumns + 0, "], got ", numel_of(table), " elements");
  job.table = static_cast<const int64_t*>(memory(table, "table", main.device, 8));
  job.num_ranges = numel_of(table) / kStepColumns;
  expect_dtype(rows, aoti_torch_dtype_float64(), "rows", "float64");
  if (numel_of(rows) % kRowColumns != 0)
    refuse(kOp, ": rows must be [K, ", kRowColumns + 0, "], got ", numel_of(rows), " elements");
  // The host reads them, whatever the device.
  const Device cpu{aoti_torch_device_type_cpu(), 0};
  job.rows = static_cast<const double*>(memory(rows, "rows", cpu, 8));
  num_rows = numel_of(rows) / kRowColumns;
  for (int64_t i = 0; i < num_rows; ++i) {
    const double* const row = job.rows + i * kRowColumns;
    const int wanted = job.kind == kAdamW ? (row[kRowFlag] != 0.0 ? 3 : 2)
                       : job.kind == kSgd ? static_cast<int>(row[1] != 0.0)
                                          : 1;
    if (job.num_states < wanted)
      refuse(kOp, ": row ", i, " needs ", wanted, " states, got ", job.num_states);
  }
  if (numel_of(factor_tensor) > 0) {
    expect_dtype(factor_tensor, aoti_torch_dtype_float32(), "factor", "float32");
    factor = static_cast<const float*>(memory(factor_tensor, "factor", main.device, 4));
  }
  job.factor = 1.0f;
  job.grad_scale = static_cast<float>(unbox<double>(stack[10]));
  job.seed = unbox<int64_t>(stack[11]);
  job.mode = static_cast<StepMode>(unbox<int64_t>(stack[12]));
}

}  // namespace layerzero
